//! Commands that are answered from what is known: what the unit is, and how it is set.

use wire_scsi::capacity::Capacity;
use wire_scsi::mode::{self, BlockDescriptor, ModeHeader, ModeSettings};
use wire_scsi::{AdditionalSense, Cdb, Sense, SenseFormat, luns};

use crate::identity;
use crate::operation::{Answer, Operation};
use crate::response::{Failure, check};
use crate::task::TaskContext;
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
        _ => return Err(check(Sense::illegal(AdditionalSense::INVALID_COMMAND_OPERATION_CODE))),
    };
    Ok(Started::Answer(answer))
}

/// Reports the oldest unit attention, or nothing (SPC-4, section 6.39).
fn request_sense(context: &TaskContext<'_>, descriptor: bool) -> Vec<u8> {
    let sense = context.nexus.take_attention().map_or(Sense::default(), Sense::attention);
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

fn device_specific(unit: &LogicalUnit) -> u8 {
    let is_protected = unit.config().read_only || unit.is_software_protected();
    mode::DPO_FUA | if is_protected { mode::WRITE_PROTECT } else { 0 }
}

/// Every page with its subpage, in the order of MODE SENSE's answer.
const MODE_PAGES: [(u8, u8); 6] = [
    (mode::page::ERROR_RECOVERY, 0),
    (mode::page::DISCONNECT, 0),
    (mode::page::CACHING, 0),
    (mode::page::CONTROL, 0),
    (mode::page::CONTROL, 1),
    (mode::page::EXCEPTIONS, 0),
];

/// Mode pages (SPC-4, section 6.11).
fn mode_pages(unit: &LogicalUnit, page_control: u8, page: u8, subpage: u8) -> Result<Vec<u8>, Failure> {
    let (settings, is_mask) = match page_control {
        0 => (unit.settings(), false),
        // Nothing can be changed.
        1 => (ModeSettings::default(), true),
        2 => (unit.default_settings(), false),
        _ => return Err(check(Sense::illegal(AdditionalSense::SAVING_NOT_SUPPORTED))),
    };
    if !matches!(subpage, 0 | 1 | mode::page::ALL_SUBPAGES) {
        return Err(check(Sense::invalid_field(3, None)));
    }
    let is_asked = |&&(code, sub): &&(u8, u8)| {
        let has_page = page == mode::page::ALL || page == code;
        let has_subpage = subpage == mode::page::ALL_SUBPAGES || subpage == sub;
        has_page && has_subpage
    };
    let mut pages = Vec::new();
    for (code, sub) in MODE_PAGES.iter().filter(is_asked) {
        pages.extend(settings.encode(*code, *sub, is_mask).into_iter().flatten());
    }
    if pages.is_empty() {
        return Err(check(Sense::invalid_field(2, Some(5))));
    }
    Ok(pages)
}
