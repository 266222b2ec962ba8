//! How the program ends when it does not end well.

use std::fmt;
use std::process::ExitCode;

/// One line that says what to do, and the exit status that scripts tell it by.
#[derive(Debug)]
pub(crate) struct Failure {
    kind: Kind,
    message: String,
}

/// The exit statuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// 1: it ran, and what it did failed: an I/O, a check of data, a method.
    Work,
    /// 2: the command line is wrong.
    Usage,
    /// 3: the configuration is wrong.
    Config,
    /// 4: the machine does not have what is needed.
    Machine,
    /// 5: nobody answers on the RPC socket.
    NoServer,
}

impl Failure {
    pub(crate) fn new(kind: Kind, message: impl fmt::Display) -> Failure {
        Failure { kind, message: message.to_string() }
    }

    pub(crate) fn work(message: impl fmt::Display) -> Failure {
        Failure::new(Kind::Work, message)
    }

    pub(crate) fn usage(message: impl fmt::Display) -> Failure {
        Failure::new(Kind::Usage, message)
    }

    pub(crate) fn config(message: impl fmt::Display) -> Failure {
        Failure::new(Kind::Config, message)
    }

    pub(crate) fn machine(message: impl fmt::Display) -> Failure {
        Failure::new(Kind::Machine, message)
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self.kind {
            Kind::Work => 1,
            Kind::Usage => 2,
            Kind::Config => 3,
            Kind::Machine => 4,
            Kind::NoServer => 5,
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
