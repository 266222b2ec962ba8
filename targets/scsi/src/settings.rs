//! Mode pages, and MODE SELECT (SPC-4, sections 6.9 and 6.11).

#[cfg(test)]
mod tests;

use wire_scsi::mode::{self, ModePage, ModeSettings, pages_of_list};
use wire_scsi::{AdditionalSense, Sense};

use crate::operation::{Answer, Operation, OperationContext, OperationEvent, Progress, bytes_of};
use crate::response::{Failure, check};
use crate::unit::LogicalUnit;

/// Every page with its subpage, in the order of MODE SENSE's answer.
const MODE_PAGES: [(u8, u8); 6] = [
    (mode::page::ERROR_RECOVERY, 0),
    (mode::page::DISCONNECT, 0),
    (mode::page::CACHING, 0),
    (mode::page::CONTROL, 0),
    (mode::page::CONTROL, 1),
    (mode::page::EXCEPTIONS, 0),
];

/// The device-specific parameter.
pub(crate) fn device_specific(unit: &LogicalUnit) -> u8 {
    let is_protected = unit.config().read_only || unit.is_software_protected();
    mode::DPO_FUA | if is_protected { mode::WRITE_PROTECT } else { 0 }
}

/// What MODE SELECT can change.
fn changeable(unit: &LogicalUnit) -> ModeSettings {
    let write_cache = unit.config().geometry.write_cache;
    ModeSettings { write_cache, descriptor_sense: true, write_protect: true }
}

/// The pages that MODE SENSE asks for.
pub(crate) fn mode_pages(
    unit: &LogicalUnit,
    page_control: u8,
    page: u8,
    subpage: u8,
) -> Result<Vec<u8>, Failure> {
    let (settings, is_mask) = match page_control {
        0 => (unit.settings(), false),
        1 => (changeable(unit), true),
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

/// MODE SELECT: receives pages, and applies all of them or none.
#[derive(Debug)]
pub(crate) struct ModeSelect {
    ten: bool,
    parameter_bytes: u32,
}

impl ModeSelect {
    /// # Errors
    /// The pages have no standard format, or are to be saved.
    pub(crate) fn new(
        ten: bool,
        page_format: bool,
        save: bool,
        parameter_bytes: u32,
    ) -> Result<ModeSelect, Failure> {
        if !page_format {
            return Err(check(Sense::invalid_field(1, Some(4))));
        }
        if save {
            return Err(check(Sense::invalid_field(1, Some(0))));
        }
        Ok(ModeSelect { ten, parameter_bytes })
    }

    fn apply(&self, list: &[u8], context: &OperationContext<'_>) -> Result<(), Failure> {
        let cut = || check(Sense::illegal(AdditionalSense::PARAMETER_LIST_LENGTH_ERROR));
        let mut rest = pages_of_list(list, self.ten).map_err(|_| cut())?;
        let unit = context.nexus.unit();
        let before = unit.settings();
        let mut after = before;
        while !rest.is_empty() {
            let at = (list.len() - rest.len()) as u16;
            let (page, following) = ModePage::decode(rest).map_err(|_| cut())?;
            after = after.with_page(&page);
            // What cannot be changed must be as it is; PS is reserved here.
            let expected = after.encode(page.page, page.subpage, false);
            let is_same = expected.is_some_and(|expected| {
                expected.len() == page.bytes.len()
                    && expected[0] == page.bytes[0] & 0x7f
                    && expected[1..] == page.bytes[1..]
            });
            let adds_cache = after.write_cache && !changeable(unit).write_cache;
            if !is_same || adds_cache {
                return Err(check(Sense::invalid_parameter(at, None)));
            }
            rest = following;
        }
        if after != before {
            unit.apply_settings(after);
            let own = context.nexus.id();
            unit.set_attentions(AdditionalSense::MODE_PARAMETERS_CHANGED, |other| other.id() != own);
        }
        Ok(())
    }
}

impl Operation for ModeSelect {
    fn resume(&mut self, event: OperationEvent, context: &mut OperationContext<'_>) -> Progress {
        match event {
            OperationEvent::DataOut(data) => {
                let data_out_bytes = self.parameter_bytes.into();
                let result = self.apply(&bytes_of(&data), context);
                Progress::Done(result.map(|()| Answer { data_out_bytes, ..Answer::good() }))
            }
            _ if self.parameter_bytes == 0 => Progress::Done(Ok(Answer::good())),
            _ => Progress::parameters(self.parameter_bytes, context),
        }
    }
}
