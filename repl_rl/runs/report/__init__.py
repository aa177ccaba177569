"""Offline report of a run: one self-contained HTML file."""

from repl_rl.runs.report.render_report import (
    PLAYER_SCRIPTS,
    SettingDifferences,
    build_comparison,
    is_report_page,
    make_distinct_names,
    read_page_file,
    read_scripts,
    render_page,
    render_player_page,
    write_comparison,
    write_report,
)
from repl_rl.runs.report.report_data import (
    MAX_TRAJECTORIES,
    build_entries_payload,
    build_full_detail,
    build_payload,
    pack_json,
    shorten_text,
)
from repl_rl.runs.report.report_server import ReportServer

__all__ = [
    "MAX_TRAJECTORIES",
    "PLAYER_SCRIPTS",
    "ReportServer",
    "SettingDifferences",
    "build_comparison",
    "build_entries_payload",
    "build_full_detail",
    "build_payload",
    "is_report_page",
    "make_distinct_names",
    "pack_json",
    "read_page_file",
    "read_scripts",
    "render_page",
    "render_player_page",
    "shorten_text",
    "write_comparison",
    "write_report",
]
