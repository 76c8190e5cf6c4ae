"""One module for each command."""

from typing import TYPE_CHECKING

from anybatch.lazy import lazily

if TYPE_CHECKING:
    from anybatch.cli.commands.opened_run import TrainRequest
    from anybatch.cli.commands.run_compare import compare_command
    from anybatch.cli.commands.run_doctor import DoctorRequest, doctor_command
    from anybatch.cli.commands.run_pages import learn_command, self_test_command
    from anybatch.cli.commands.run_trace import trace_command
    from anybatch.cli.commands.run_train import train_command
    from anybatch.cli.commands.run_verify import verify_command
else:
    __getattr__ = lazily(__name__)

__all__ = [
    "DoctorRequest",
    "TrainRequest",
    "compare_command",
    "doctor_command",
    "learn_command",
    "self_test_command",
    "trace_command",
    "train_command",
    "verify_command",
]
