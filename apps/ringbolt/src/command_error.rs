//! The error type of all commands, with its exit status.

use std::fmt;
use std::process::ExitCode;

/// One line for standard error that says what to do, and an exit status for scripts.
#[derive(Debug)]
pub(crate) struct CommandError {
    kind: ExitStatus,
    message: String,
}

/// Exit statuses other than 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExitStatus {
    /// 1: an I/O, a data check or an RPC method failed.
    Operation,
    /// 2: the command line is invalid.
    Usage,
    /// 3: the configuration is invalid.
    Config,
    /// 4: the machine lacks a file or directory that is named, a resource, a permission or a kernel feature.
    Environment,
    /// 5: no server answers on the RPC socket.
    NoServer,
    /// 6: the measurements are too noisy to decide what was asked.
    Undecided,
}

impl CommandError {
    pub(crate) fn new(kind: ExitStatus, message: impl fmt::Display) -> CommandError {
        CommandError { kind, message: message.to_string() }
    }

    pub(crate) fn operation(message: impl fmt::Display) -> CommandError {
        CommandError::new(ExitStatus::Operation, message)
    }

    pub(crate) fn usage(message: impl fmt::Display) -> CommandError {
        CommandError::new(ExitStatus::Usage, message)
    }

    pub(crate) fn config(message: impl fmt::Display) -> CommandError {
        CommandError::new(ExitStatus::Config, message)
    }

    pub(crate) fn environment(message: impl fmt::Display) -> CommandError {
        CommandError::new(ExitStatus::Environment, message)
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self.kind {
            ExitStatus::Operation => 1,
            ExitStatus::Usage => 2,
            ExitStatus::Config => 3,
            ExitStatus::Environment => 4,
            ExitStatus::NoServer => 5,
            ExitStatus::Undecided => 6,
        })
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
