//! The order of commands, in a session with one connection or several (RFC 7143, section 4.2.2.1).

use wire_iscsi::{BasicHeader, HEADER_BYTES, Opcode, RESERVED_TAG, TaskFunction};

use super::Session;
use crate::failure::IscsiViolation;
use crate::numbers::Turn;

/// What a header says about its place among commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// It has none: data, answers, and what is executed at once.
    None,
    /// It is the command with this number.
    Number(u32),
    /// It concerns the commands before this number.
    After(u32),
}

impl Place {
    fn of(header: &[u8; HEADER_BYTES]) -> Place {
        let Ok(common) = BasicHeader::decode(header) else { return Place::None };
        let word =
            |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        match common.opcode {
            Opcode::NopOut if word(16) == RESERVED_TAG => Place::None,
            Opcode::ScsiCommand
            | Opcode::NopOut
            | Opcode::TextRequest
            | Opcode::TaskManagementRequest
            | Opcode::LogoutRequest
                if !common.immediate =>
            {
                Place::Number(word(24))
            }
            // Sets of tasks have all commands before the function (RFC 7143, section 4.2.2.1); one task is
            // named.
            Opcode::TaskManagementRequest if header[1] & 0x7f != u8::from(TaskFunction::AbortTask) => {
                Place::After(word(24))
            }
            _ => Place::None,
        }
    }
}

impl Session {
    #[inline]
    pub(super) fn exp_cmd_sn(&self) -> u32 {
        self.shared.numbers.expected()
    }

    #[inline]
    pub(super) fn max_cmd_sn(&self) -> u32 {
        self.shared.numbers.max()
    }

    /// A command has ended, so that the initiator may send another one.
    #[inline]
    pub(super) fn widen_window(&self) {
        self.shared.numbers.widen(1);
    }

    /// Whether the PDU that begins with a header has to wait for commands on other connections. The session
    /// [is out of turn](Self::is_out_of_turn) as long as it has.
    #[inline]
    pub(crate) fn waits_for_turn(&mut self, header: &[u8; HEADER_BYTES]) -> bool {
        let numbers = &self.shared.numbers;
        if !numbers.is_shared() {
            return false;
        }
        let place = Place::of(header);
        self.is_out_of_turn = match place {
            Place::None => false,
            Place::Number(cmd_sn) | Place::After(cmd_sn) => {
                numbers.turn(cmd_sn) == Turn::Later && numbers.wait_for_turn(cmd_sn) == Turn::Later
            }
        };
        self.is_out_of_turn
    }

    /// The command that waits is received nevertheless, and its turn is looked at later.
    pub(crate) fn end_wait_for_turn(&mut self) {
        self.is_out_of_turn = false;
    }

    /// Whether a command waits for those before it.
    #[inline]
    pub(crate) fn is_out_of_turn(&self) -> bool {
        self.is_out_of_turn
    }

    /// Counts a command. Returns whether it is to be executed: what is outside the window is ignored.
    pub(super) fn admit(&mut self, is_immediate: bool, cmd_sn: u32) -> Result<bool, IscsiViolation> {
        if is_immediate {
            return Ok(true);
        }
        let numbers = &self.shared.numbers;
        match numbers.turn(cmd_sn) {
            Turn::Never => Ok(false),
            // A connection carries commands in order, and the session has one.
            Turn::Later if !numbers.is_shared() => {
                Err(IscsiViolation::CommandMissing { expected: numbers.expected(), got: cmd_sn })
            }
            // Its number is used on another connection at the same time.
            Turn::Later => Ok(false),
            Turn::Now => {
                let is_claimed = numbers.claim(cmd_sn);
                if is_claimed {
                    self.claimed = Some(cmd_sn);
                }
                Ok(is_claimed)
            }
        }
    }

    /// The command that was admitted has started: the next one may.
    #[inline]
    pub(super) fn finish_delivery(&mut self) {
        if let Some(cmd_sn) = self.claimed.take()
            && self.shared.numbers.deliver(cmd_sn)
        {
            self.handle.notify_all();
        }
    }
}

impl Drop for Session {
    /// What the connection has not answered makes room for the others of the session.
    fn drop(&mut self) {
        self.finish_delivery();
        let unanswered = self.commands.len() as u32 - self.immediate_commands;
        self.shared.numbers.widen(unanswered);
    }
}

#[cfg(test)]
mod tests {
    use wire_iscsi::{DataOut, LogoutRequest, NopOut, ScsiCommand, TaskManagementRequest};

    use super::*;

    #[test]
    fn commands_and_functions_of_task_sets_have_a_place() {
        let command = ScsiCommand { cmd_sn: 7, ..ScsiCommand::default() };
        assert_eq!(Place::of(&command.to_bytes()), Place::Number(7));
        assert_eq!(Place::of(&ScsiCommand { immediate: true, ..command }.to_bytes()), Place::None);
        assert_eq!(Place::of(&DataOut::default().to_bytes()), Place::None);
        let logout = LogoutRequest { cmd_sn: 9, ..LogoutRequest::default() };
        assert_eq!(Place::of(&logout.to_bytes()), Place::Number(9));
        let ping = NopOut { cmd_sn: 5, initiator_task_tag: 1, ..NopOut::default() };
        assert_eq!(Place::of(&ping.to_bytes()), Place::Number(5));
        let answer = NopOut { initiator_task_tag: RESERVED_TAG, ..ping };
        assert_eq!(Place::of(&answer.to_bytes()), Place::None);
        for (function, place) in [
            (TaskFunction::AbortTask, Place::None),
            (TaskFunction::AbortTaskSet, Place::After(3)),
            (TaskFunction::LogicalUnitReset, Place::After(3)),
        ] {
            let request = TaskManagementRequest {
                immediate: true,
                function: function.into(),
                cmd_sn: 3,
                ..TaskManagementRequest::default()
            };
            assert_eq!(Place::of(&request.to_bytes()), place);
        }
    }
}
