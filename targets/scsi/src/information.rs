//! Commands that are answered from what is known: what the unit is, and how it is set.

use wire_scsi::capacity::Capacity;
use wire_scsi::mode::{BlockDescriptor, ModeHeader};
use wire_scsi::port_groups::encode_port_groups;
use wire_scsi::{AdditionalSense, Cdb, CommandBits, ScsiStatus, Sense, SenseFormat, luns, opcode, report};

use crate::copy::{self, ExtendedCopy};
use crate::identity;
use crate::operation::{Answer, Flush, Operation, SetPortGroups};
use crate::reserve::{self, ReserveOut};
use crate::response::{Failure, check};
use crate::sanitize::{self, can_sanitize};
use crate::settings::{ModeSelect, device_specific, mode_pages};
use crate::task::TaskContext;
use crate::transfer::atomic_blocks_max;
use crate::unit::LogicalUnit;

/// How an uncommon command begins.
pub(crate) enum Started {
    /// It succeeds at once.
    Answer(Answer),
    /// It needs data or the device.
    Operation(Box<dyn Operation>),
}

/// Starts a command other than READ and WRITE, which the nexus may execute.
pub(crate) fn start(cdb: &Cdb, context: &mut TaskContext<'_>) -> Result<Started, Failure> {
    let unit = context.nexus.unit();
    let answer = match *cdb {
        Cdb::TestUnitReady => Answer::good(),
        Cdb::Inquiry { page: None, allocation } => Answer::data(identity::standard(unit), allocation),
        Cdb::Inquiry { page: Some(page), allocation } => {
            let content = identity::page(context.nexus, page);
            let content = content.ok_or(check(Sense::invalid_field(2, None)))?;
            Answer::data(content, allocation)
        }
        Cdb::RequestSense { descriptor, allocation } => {
            Answer::data(request_sense(context, descriptor), allocation)
        }
        Cdb::ReportLuns { select, allocation } => report_luns(context, select, allocation)?,
        Cdb::ReadCapacity10 { lba, partial } => {
            check_partial(lba, partial)?;
            Answer::data(capacity(unit).encode_short().to_vec(), u32::MAX)
        }
        Cdb::ReadCapacity16 { lba, partial, allocation } => {
            check_partial(lba, partial)?;
            Answer::data(capacity(unit).encode_long().to_vec(), allocation)
        }
        Cdb::ModeSense { ten, long_lba, no_blocks, page_control, page, subpage, allocation } => {
            let pages = mode_pages(unit, page_control, page, subpage)?;
            let blocks = (!no_blocks).then(|| BlockDescriptor {
                blocks: unit.blocks(),
                block_bytes: unit.block_bytes(),
                long: long_lba,
            });
            let header = ModeHeader { device_specific: device_specific(unit), blocks };
            Answer::data(header.encode(ten, &pages), allocation)
        }
        Cdb::ModeSelect { ten, page_format, save, parameter_bytes } => {
            return operation(ModeSelect::new(ten, page_format, save, parameter_bytes)?);
        }
        Cdb::PersistentReserveIn { action, allocation } => reserve::read(context.nexus, action, allocation)?,
        Cdb::PersistentReserveOut { action, scope, kind, parameter_bytes } => {
            return operation(ReserveOut::new(action, scope, kind, parameter_bytes)?);
        }
        Cdb::Reserve { .. } => {
            if !unit.reserve(context.nexus) {
                return Err((ScsiStatus::ReservationConflict, None));
            }
            Answer::good()
        }
        Cdb::Release { .. } => {
            unit.release(context.nexus);
            Answer::good()
        }
        Cdb::StartStopUnit { power_condition, no_flush, load_eject, start, immediate } => {
            check_start_stop(power_condition, load_eject)?;
            // Others use the unit, so that it stays ready; what is cached is made durable.
            if !start && !no_flush && unit.config().can_flush {
                return operation(Flush { is_immediate: immediate });
            }
            Answer::good()
        }
        Cdb::PreventAllowMediumRemoval { .. } => Answer::good(),
        Cdb::ExtendedCopy { parameter_bytes } => {
            if parameter_bytes > 0 {
                return operation(ExtendedCopy::new(parameter_bytes));
            }
            Answer::good()
        }
        Cdb::ReceiveCopyResults { action, list, allocation } => {
            copy::results(context.nexus, action, list, allocation)?
        }
        Cdb::ReadDefectData { twelve, primary, grown, format, allocation } => {
            Answer::data(report::encode_no_defects(twelve, primary, grown, format), allocation)
        }
        Cdb::ReportSupportedOpcodes { timeouts, options, opcode, action, allocation } => {
            Answer::data(report_opcodes(unit, timeouts, options, opcode, action)?, allocation)
        }
        Cdb::ReportSupportedFunctions { extended, allocation } => {
            Answer::data(report::encode_functions(extended), allocation)
        }
        Cdb::ReportTargetPortGroups { extended, allocation } if unit.ports().has_groups() => {
            Answer::data(encode_port_groups(&unit.ports().describe(), extended), allocation)
        }
        Cdb::SetTargetPortGroups { parameter_bytes } if unit.ports().has_groups() => {
            if parameter_bytes > 0 {
                return operation(SetPortGroups { parameter_bytes });
            }
            Answer::good()
        }
        Cdb::Sanitize { action, immediate, unrestricted_exit, parameter_bytes } if can_sanitize(unit) => {
            match sanitize::start(context.nexus, action, immediate, unrestricted_exit, parameter_bytes)? {
                Some(operation) => return Ok(Started::Operation(operation)),
                None => Answer::good(),
            }
        }
        _ => return Err(check(Sense::illegal(AdditionalSense::INVALID_COMMAND_OPERATION_CODE))),
    };
    Ok(Started::Answer(answer))
}

/// A unit has no power conditions to enter, and its medium cannot be removed.
fn check_start_stop(power_condition: u8, load_eject: bool) -> Result<(), Failure> {
    if power_condition != 0 {
        return Err(check(Sense::invalid_field(4, Some(7))));
    }
    if load_eject {
        return Err(check(Sense::invalid_field(4, Some(1))));
    }
    Ok(())
}

fn operation(operation: impl Operation + 'static) -> Result<Started, Failure> {
    Ok(Started::Operation(Box::new(operation)))
}

/// Whether the unit executes a command.
fn is_supported(unit: &LogicalUnit, command: &CommandBits) -> bool {
    match command.opcode {
        opcode::UNMAP => unit.config().can_unmap,
        opcode::COMPARE_AND_WRITE | opcode::ORWRITE_16 => bdev::supports_fused(),
        opcode::SANITIZE => command.action.is_some_and(|action| sanitize::is_supported(unit, action)),
        opcode::WRITE_ATOMIC_16 => atomic_blocks_max(unit) > 0,
        opcode::MAINTENANCE_OUT => unit.ports().has_groups(),
        opcode::MAINTENANCE_IN => {
            let is_of_groups = command.action == Some(opcode::maintenance_in::REPORT_TARGET_PORT_GROUPS);
            !is_of_groups || unit.ports().has_groups()
        }
        opcode::RECEIVE_COPY_RESULTS => {
            let known = [wire_scsi::copy::COPY_STATUS, wire_scsi::copy::OPERATING_PARAMETERS];
            command.action.is_some_and(|action| known.contains(&action))
        }
        _ => true,
    }
}

/// SPC-4, section 6.35.
fn report_opcodes(
    unit: &LogicalUnit,
    timeouts: bool,
    options: u8,
    opcode: u8,
    action: u16,
) -> Result<Vec<u8>, Failure> {
    let supported = || CommandBits::ALL.iter().filter(|command| is_supported(unit, command));
    let mut of_code = supported().filter(|command| command.opcode == opcode);
    let has_actions = of_code.clone().any(|command| command.action.is_some());
    let is_known = of_code.clone().next().is_some();
    let with_action =
        supported().find(|command| command.opcode == opcode && command.action.map(u16::from) == Some(action));
    let command = match options {
        0 => return Ok(report::encode_commands(supported(), timeouts)),
        1 if has_actions => return Err(check(Sense::invalid_field(2, Some(2)))),
        1 => of_code.next(),
        2 if is_known && !has_actions => return Err(check(Sense::invalid_field(2, Some(2)))),
        2 => with_action,
        3 if has_actions => with_action,
        3 => of_code.next().filter(|_| action == 0),
        _ => return Err(check(Sense::invalid_field(2, Some(2)))),
    };
    Ok(report::encode_command(command, timeouts))
}

/// Reports the oldest unit attention, the state of a sanitize operation, or nothing (SPC-4, section 6.39).
fn request_sense(context: &TaskContext<'_>, descriptor: bool) -> Vec<u8> {
    let attention = context.nexus.take_attention().map(Sense::attention);
    let sense = attention.or_else(|| context.nexus.unit().sanitize().sense()).unwrap_or_default();
    let format = if descriptor { SenseFormat::Descriptor } else { SenseFormat::Fixed };
    encode_sense(&sense, format)
}

pub(crate) fn encode_sense(sense: &Sense, format: SenseFormat) -> Vec<u8> {
    let mut bytes = [0; wire_scsi::SENSE_BYTES_MAX];
    let length = sense.encode(format, &mut bytes);
    bytes[..length].to_vec()
}

fn report_luns(context: &TaskContext<'_>, select: u8, allocation: u32) -> Result<Answer, Failure> {
    let answer = list_luns(context.luns, select, allocation)?;
    context.nexus.clear_attention(AdditionalSense::REPORTED_LUNS_CHANGED);
    Ok(answer)
}

/// The answer to REPORT LUNS (SPC-4, section 6.33).
pub(crate) fn list_luns(luns: &[u16], select: u8, allocation: u32) -> Result<Answer, Failure> {
    let listed = match select {
        0x00 | 0x02 => luns,
        // Well-known logical units, of which there are none.
        0x01 => &[],
        _ => return Err(check(Sense::invalid_field(2, None))),
    };
    if allocation < 16 {
        return Err(check(Sense::invalid_field(6, None)));
    }
    Ok(Answer::data(luns::encode_list(listed.iter().copied()), allocation))
}

fn check_partial(lba: u64, partial: bool) -> Result<(), Failure> {
    // SBC-4 makes both fields obsolete; SBC-3 forbids an address without PMI.
    if lba != 0 && !partial { Err(check(Sense::invalid_field(2, None))) } else { Ok(()) }
}

fn capacity(unit: &LogicalUnit) -> Capacity {
    let config = unit.config();
    let per_physical = config.geometry.physical_block_size / config.geometry.block_size.max(1);
    Capacity {
        last_lba: unit.blocks().saturating_sub(1),
        block_bytes: unit.block_bytes(),
        physical_exponent: per_physical.max(1).ilog2() as u8,
        provisioning: config.can_unmap,
        reads_zeroes: config.can_unmap,
    }
}
