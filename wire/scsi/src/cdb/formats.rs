//! CDB usage data: which bits of each command mean something (SPC-4, section 6.35.4).

use crate::opcode as op;

/// A command, and the bits of its CDB that are evaluated. The operation code and the service action are as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandBits {
    /// Operation code.
    pub opcode: u8,
    /// Service action, of operation codes that have some.
    pub action: Option<u8>,
    /// CDB usage data; as long as the CDB.
    pub usage: &'static [u8],
}

impl CommandBits {
    /// Every command that [`Cdb`](crate::Cdb) decodes, in the order of operation codes.
    pub const ALL: &'static [CommandBits] = &COMMANDS;

    /// The command with this code, and this service action if it is given.
    pub fn find(opcode: u8, action: Option<u8>) -> Option<&'static CommandBits> {
        let mut found = COMMANDS.iter().filter(|command| command.opcode == opcode);
        found.find(|command| action.is_none() || command.action == action)
    }
}

const fn plain(opcode: u8, usage: &'static [u8]) -> CommandBits {
    CommandBits { opcode, action: None, usage }
}

const fn acting(opcode: u8, action: u8, usage: &'static [u8]) -> CommandBits {
    CommandBits { opcode, action: Some(action), usage }
}

const F: u8 = 0xff;

const COMMANDS: [CommandBits; 66] = [
    plain(op::TEST_UNIT_READY, &[0x00, 0, 0, 0, 0, 0x04]),
    plain(op::REQUEST_SENSE, &[0x03, 0x01, 0, 0, F, 0x04]),
    plain(op::READ_6, &[0x08, 0x1f, F, F, F, 0x04]),
    plain(op::WRITE_6, &[0x0a, 0x1f, F, F, F, 0x04]),
    plain(op::INQUIRY, &[0x12, 0x01, F, F, F, 0x04]),
    plain(op::MODE_SELECT_6, &[0x15, 0x11, 0, 0, F, 0x04]),
    plain(op::RESERVE_6, &[0x16, 0x11, 0, 0, 0, 0x04]),
    plain(op::RELEASE_6, &[0x17, 0x11, 0, 0, 0, 0x04]),
    plain(op::MODE_SENSE_6, &[0x1a, 0x08, F, F, F, 0x04]),
    plain(op::START_STOP_UNIT, &[0x1b, 0x01, 0, 0, 0xf7, 0x04]),
    plain(op::PREVENT_ALLOW_MEDIUM_REMOVAL, &[0x1e, 0, 0, 0, 0x03, 0x04]),
    plain(op::READ_CAPACITY_10, &[0x25, 0, F, F, F, F, 0, 0, 0x01, 0x04]),
    plain(op::READ_10, &[0x28, 0xf8, F, F, F, F, 0, F, F, 0x04]),
    plain(op::WRITE_10, &[0x2a, 0xf8, F, F, F, F, 0, F, F, 0x04]),
    plain(op::WRITE_AND_VERIFY_10, &[0x2e, 0xf6, F, F, F, F, 0, F, F, 0x04]),
    plain(op::VERIFY_10, &[0x2f, 0xf6, F, F, F, F, 0, F, F, 0x04]),
    plain(op::PRE_FETCH_10, &[0x34, 0x02, F, F, F, F, 0, F, F, 0x04]),
    plain(op::SYNCHRONIZE_CACHE_10, &[0x35, 0x02, F, F, F, F, 0, F, F, 0x04]),
    plain(op::READ_DEFECT_DATA_10, &[0x37, 0, 0x1f, 0, 0, 0, 0, F, F, 0x04]),
    plain(op::WRITE_SAME_10, &[0x41, 0xf8, F, F, F, F, 0, F, F, 0x04]),
    plain(op::UNMAP, &[0x42, 0x01, 0, 0, 0, 0, 0, F, F, 0x04]),
    acting(op::SANITIZE, op::sanitize::OVERWRITE, &[0x48, 0xa1, 0, 0, 0, 0, 0, F, F, 0x04]),
    acting(op::SANITIZE, op::sanitize::BLOCK_ERASE, &[0x48, 0xa2, 0, 0, 0, 0, 0, F, F, 0x04]),
    acting(op::SANITIZE, op::sanitize::CRYPTOGRAPHIC_ERASE, &[0x48, 0xa3, 0, 0, 0, 0, 0, F, F, 0x04]),
    acting(op::SANITIZE, op::sanitize::EXIT_FAILURE_MODE, &[0x48, 0x1f, 0, 0, 0, 0, 0, F, F, 0x04]),
    plain(op::MODE_SELECT_10, &[0x55, 0x11, 0, 0, 0, 0, 0, F, F, 0x04]),
    plain(op::RESERVE_10, &[0x56, 0x13, 0, 0, 0, 0, 0, F, F, 0x04]),
    plain(op::RELEASE_10, &[0x57, 0x13, 0, 0, 0, 0, 0, F, F, 0x04]),
    plain(op::MODE_SENSE_10, &[0x5a, 0x18, F, F, 0, 0, 0, F, F, 0x04]),
    acting(op::PERSISTENT_RESERVE_IN, 0, &[0x5e, 0x00, 0, 0, 0, 0, 0, F, F, 0x04]),
    acting(op::PERSISTENT_RESERVE_IN, 1, &[0x5e, 0x01, 0, 0, 0, 0, 0, F, F, 0x04]),
    acting(op::PERSISTENT_RESERVE_IN, 2, &[0x5e, 0x02, 0, 0, 0, 0, 0, F, F, 0x04]),
    acting(op::PERSISTENT_RESERVE_IN, 3, &[0x5e, 0x03, 0, 0, 0, 0, 0, F, F, 0x04]),
    acting(op::PERSISTENT_RESERVE_OUT, 0, &[0x5f, 0x00, F, 0, 0, F, F, F, F, 0x04]),
    acting(op::PERSISTENT_RESERVE_OUT, 1, &[0x5f, 0x01, F, 0, 0, F, F, F, F, 0x04]),
    acting(op::PERSISTENT_RESERVE_OUT, 2, &[0x5f, 0x02, F, 0, 0, F, F, F, F, 0x04]),
    acting(op::PERSISTENT_RESERVE_OUT, 3, &[0x5f, 0x03, F, 0, 0, F, F, F, F, 0x04]),
    acting(op::PERSISTENT_RESERVE_OUT, 4, &[0x5f, 0x04, F, 0, 0, F, F, F, F, 0x04]),
    acting(op::PERSISTENT_RESERVE_OUT, 5, &[0x5f, 0x05, F, 0, 0, F, F, F, F, 0x04]),
    acting(op::PERSISTENT_RESERVE_OUT, 6, &[0x5f, 0x06, F, 0, 0, F, F, F, F, 0x04]),
    acting(op::PERSISTENT_RESERVE_OUT, 7, &[0x5f, 0x07, F, 0, 0, F, F, F, F, 0x04]),
    acting(op::EXTENDED_COPY, 0, &[0x83, 0x00, 0, 0, 0, 0, 0, 0, 0, 0, F, F, F, F, 0, 0x04]),
    acting(op::RECEIVE_COPY_RESULTS, 0, &[0x84, 0x00, F, 0, 0, 0, 0, 0, 0, 0, F, F, F, F, 0, 0x04]),
    acting(op::RECEIVE_COPY_RESULTS, 3, &[0x84, 0x03, F, 0, 0, 0, 0, 0, 0, 0, F, F, F, F, 0, 0x04]),
    plain(op::READ_16, &[0x88, 0xf8, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0x04]),
    plain(op::COMPARE_AND_WRITE, &[0x89, 0xf8, F, F, F, F, F, F, F, F, 0, 0, 0, F, 0, 0x04]),
    plain(op::WRITE_16, &[0x8a, 0xf8, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0x04]),
    plain(op::ORWRITE_16, &[0x8b, 0xf8, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0x04]),
    plain(op::WRITE_AND_VERIFY_16, &[0x8e, 0xf6, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0x04]),
    plain(op::VERIFY_16, &[0x8f, 0xf6, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0x04]),
    plain(op::PRE_FETCH_16, &[0x90, 0x02, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0x04]),
    plain(op::SYNCHRONIZE_CACHE_16, &[0x91, 0x02, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0x04]),
    plain(op::WRITE_SAME_16, &[0x93, 0xf9, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0x04]),
    plain(op::WRITE_ATOMIC_16, &[0x9c, 0xf8, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0x04]),
    acting(op::SERVICE_ACTION_IN_16, 0x10, &[0x9e, 0x10, F, F, F, F, F, F, F, F, F, F, F, F, 0x01, 0x04]),
    acting(op::SERVICE_ACTION_IN_16, 0x12, &[0x9e, 0x12, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0x04]),
    plain(op::REPORT_LUNS, &[0xa0, 0, F, 0, 0, 0, F, F, F, F, 0, 0x04]),
    acting(op::MAINTENANCE_IN, 0x0a, &[0xa3, 0xea, 0, 0, 0, 0, F, F, F, F, 0, 0x04]),
    acting(op::MAINTENANCE_IN, 0x0c, &[0xa3, 0x0c, 0x87, F, F, F, F, F, F, F, 0, 0x04]),
    acting(op::MAINTENANCE_IN, 0x0d, &[0xa3, 0x0d, 0x80, 0, 0, 0, F, F, F, F, 0, 0x04]),
    acting(op::MAINTENANCE_OUT, 0x0a, &[0xa4, 0x0a, 0, 0, 0, 0, F, F, F, F, 0, 0x04]),
    plain(op::READ_12, &[0xa8, 0xf8, F, F, F, F, F, F, F, F, 0, 0x04]),
    plain(op::WRITE_12, &[0xaa, 0xf8, F, F, F, F, F, F, F, F, 0, 0x04]),
    plain(op::WRITE_AND_VERIFY_12, &[0xae, 0xf6, F, F, F, F, F, F, F, F, 0, 0x04]),
    plain(op::VERIFY_12, &[0xaf, 0xf6, F, F, F, F, F, F, F, F, 0, 0x04]),
    plain(op::READ_DEFECT_DATA_12, &[0xb7, 0x1f, F, F, F, F, F, F, F, F, 0, 0x04]),
];
