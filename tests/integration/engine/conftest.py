"""One engine of each kind that needs no process, for all tests of engines."""

from tests.support.engine.hosts import lasting_host as lasting_host
from tests.support.engine.hosts import other_folder as other_folder
from tests.support.engine.hosts import policy_folder as policy_folder
from tests.support.engine.hosts import scripted_host as scripted_host
from tests.support.engine.hosts import transformers_host as transformers_host
