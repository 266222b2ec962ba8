//! Parameter data of REPORT SUPPORTED OPERATION CODES and TASK MANAGEMENT FUNCTIONS, and of READ DEFECT DATA (SPC-4,
//! sections 6.35 and 6.36; SBC-4, section 5.21).

use crate::CommandBits;

/// A command timeouts descriptor without timeouts.
const TIMEOUTS: [u8; 12] = [0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// All commands.
pub fn encode_commands<'a>(commands: impl Iterator<Item = &'a CommandBits>, timeouts: bool) -> Vec<u8> {
    let mut content = Vec::new();
    for command in commands {
        let flags = u8::from(timeouts) << 1 | u8::from(command.action.is_some());
        let length = command.usage.len() as u8;
        content.extend([command.opcode, 0, 0, command.action.unwrap_or(0), 0, flags, 0, length]);
        if timeouts {
            content.extend(TIMEOUTS);
        }
    }
    [&(content.len() as u32).to_be_bytes(), &content[..]].concat()
}

/// One command; `None` if it is not supported.
pub fn encode_command(command: Option<&CommandBits>, timeouts: bool) -> Vec<u8> {
    let Some(command) = command else { return vec![0, 0x01, 0, 0] };
    let mut bytes = vec![0, u8::from(timeouts) << 7 | 0x03, 0, command.usage.len() as u8];
    bytes.extend(command.usage);
    if timeouts {
        bytes.extend(TIMEOUTS);
    }
    bytes
}

/// ABORT TASK, ABORT TASK SET, CLEAR TASK SET, LOGICAL UNIT RESET and TARGET RESET.
pub fn encode_functions(extended: bool) -> Vec<u8> {
    let mut bytes = vec![0xda, 0, 0, 0];
    if extended {
        bytes[3] = 12;
        bytes.extend([0; 12]);
    }
    bytes
}

/// Empty lists of defects, of those that were asked for.
pub fn encode_no_defects(twelve: bool, primary: bool, grown: bool, format: u8) -> Vec<u8> {
    let flags = u8::from(primary) << 4 | u8::from(grown) << 3 | format & 7;
    let mut bytes = vec![0, flags, 0, 0];
    if twelve {
        bytes.extend([0; 4]);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_listed_with_and_without_timeouts() {
        let command = CommandBits::find(0x9e, Some(0x10)).unwrap();
        let listed = encode_commands([command].into_iter(), false);
        assert_eq!(listed, [0, 0, 0, 8, 0x9e, 0, 0, 0x10, 0, 1, 0, 16]);
        let listed = encode_commands([command].into_iter(), true);
        assert_eq!((listed[3], listed[9], &listed[12..14]), (20, 3, &[0, 10][..]));
        let one = encode_command(CommandBits::find(0, None), true);
        assert_eq!(one[..10], [0, 0x83, 0, 6, 0, 0, 0, 0, 0, 4]);
        assert_eq!((one.len(), encode_command(None, true)), (22, vec![0, 1, 0, 0]));
        assert_eq!((encode_functions(false).len(), encode_functions(true).len()), (4, 16));
        assert_eq!(encode_no_defects(true, true, false, 5), [0, 0x15, 0, 0, 0, 0, 0, 0]);
    }
}
