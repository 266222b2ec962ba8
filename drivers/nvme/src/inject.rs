//! Errors on purpose: what a test makes of completions that match.

use ring::Status;

/// What becomes of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is thrown away, as if the device had never answered; the command stays in flight until the
    /// controller is reset.
    Drop,
    /// It reports this instead.
    Status(Status),
}

/// A fault for the next commands of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Injection {
    /// Opcode of the commands.
    pub opcode: u8,
    /// How many of them.
    pub count: u32,
    /// What becomes of their completions.
    pub fault: Fault,
}

/// Most injections at a time on one queue.
const INJECTIONS_MAX: usize = 16;

#[derive(Default)]
pub(crate) struct Injections(Vec<Injection>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Injected {
    Nothing,
    Status(Status),
    Drop,
}

impl Injections {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds one; `false` when there are too many.
    pub(crate) fn add(&mut self, injection: Injection) -> bool {
        let room = self.0.len() < INJECTIONS_MAX && injection.count > 0;
        if room {
            self.0.push(injection);
        }
        room
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    pub(crate) fn next(&mut self, opcode: u8) -> Injected {
        let Some(at) = self.0.iter().position(|injection| injection.opcode == opcode) else {
            return Injected::Nothing;
        };
        let injection = &mut self.0[at];
        injection.count -= 1;
        let fault = injection.fault;
        if injection.count == 0 {
            self.0.remove(at);
        }
        match fault {
            Fault::Drop => Injected::Drop,
            Fault::Status(status) => Injected::Status(status),
        }
    }
}
