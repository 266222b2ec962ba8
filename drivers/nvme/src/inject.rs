//! Fault injection into completions, for tests.

use block_io::Status;

/// Fault applied to a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionFault {
    /// The completion is dropped, as if the device had never posted it; the command stays in flight until the
    /// controller is reset.
    Drop,
    /// The completion reports this status.
    Status(Status),
}

/// A fault for the next commands with one opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletionInjection {
    /// NVM opcode of the commands; see [`opcode_of`](crate::opcode_of).
    pub opcode: u8,
    /// Number of completions to which the fault applies.
    pub count: u32,
    /// Fault applied to their completions.
    pub fault: CompletionFault,
}

/// Most active injections per queue.
const INJECTIONS_MAX: usize = 16;

#[derive(Default)]
pub(crate) struct CompletionInjections(Vec<CompletionInjection>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InjectedFault {
    Nothing,
    Status(Status),
    Drop,
}

impl CompletionInjections {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds an injection; returns `false` if there are too many or its count is 0.
    pub(crate) fn add(&mut self, injection: CompletionInjection) -> bool {
        let room = self.0.len() < INJECTIONS_MAX && injection.count > 0;
        if room {
            self.0.push(injection);
        }
        room
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    pub(crate) fn next(&mut self, opcode: u8) -> InjectedFault {
        let Some(at) = self.0.iter().position(|injection| injection.opcode == opcode) else {
            return InjectedFault::Nothing;
        };
        let injection = &mut self.0[at];
        injection.count -= 1;
        let fault = injection.fault;
        if injection.count == 0 {
            self.0.remove(at);
        }
        match fault {
            CompletionFault::Drop => InjectedFault::Drop,
            CompletionFault::Status(status) => InjectedFault::Status(status),
        }
    }
}
