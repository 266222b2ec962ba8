//! Mode parameters (SPC-4, section 7.5; SBC-4, section 6.5).

#[cfg(test)]
mod tests;

use crate::DecodeError;
use crate::bytes::be16;

/// Page and subpage codes.
pub mod page {
    /// Read-write error recovery.
    pub const ERROR_RECOVERY: u8 = 0x01;
    /// Disconnect-reconnect.
    pub const DISCONNECT: u8 = 0x02;
    /// Caching.
    pub const CACHING: u8 = 0x08;
    /// Control; with subpage 1 its extension.
    pub const CONTROL: u8 = 0x0a;
    /// Power condition.
    pub const POWER: u8 = 0x1a;
    /// Informational exceptions control.
    pub const EXCEPTIONS: u8 = 0x1c;
    /// All pages.
    pub const ALL: u8 = 0x3f;
    /// All subpages.
    pub const ALL_SUBPAGES: u8 = 0xff;
}

/// WP of the device-specific parameter.
pub const WRITE_PROTECT: u8 = 0x80;
/// DPOFUA of the device-specific parameter.
pub const DPO_FUA: u8 = 0x10;

/// The mode parameter header and its block descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModeHeader {
    /// DEVICE-SPECIFIC PARAMETER: [`WRITE_PROTECT`] and [`DPO_FUA`].
    pub device_specific: u8,
    /// The block descriptor, if there is one.
    pub blocks: Option<BlockDescriptor>,
}

/// A block descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockDescriptor {
    /// Number of blocks.
    pub blocks: u64,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// 16 bytes with 64 bits for the number of blocks, instead of 8 bytes with 32.
    pub long: bool,
}

impl BlockDescriptor {
    fn encode(&self) -> Vec<u8> {
        if self.long {
            return [&self.blocks.to_be_bytes()[..], &[0; 4], &self.block_bytes.to_be_bytes()].concat();
        }
        let blocks = u32::try_from(self.blocks).unwrap_or(u32::MAX);
        [blocks.to_be_bytes(), (self.block_bytes & 0xff_ffff).to_be_bytes()].concat()
    }
}

impl ModeHeader {
    /// The mode parameter list of a MODE SENSE(10), or else of a MODE SENSE(6), with these pages. A length that has no
    /// room is the largest there is.
    pub fn encode(&self, ten: bool, pages: &[u8]) -> Vec<u8> {
        let descriptor = self.blocks.map_or(Vec::new(), |blocks| blocks.encode());
        let mut bytes = if ten {
            let length = u16::try_from(6 + descriptor.len() + pages.len()).unwrap_or(u16::MAX);
            let [high, low] = length.to_be_bytes();
            let long = u8::from(self.blocks.is_some_and(|blocks| blocks.long));
            vec![high, low, 0, self.device_specific, long, 0, 0, descriptor.len() as u8]
        } else {
            let length = u8::try_from(3 + descriptor.len() + pages.len()).unwrap_or(u8::MAX);
            vec![length, 0, self.device_specific, descriptor.len() as u8]
        };
        bytes.extend(descriptor);
        bytes.extend_from_slice(pages);
        bytes
    }
}

/// The pages of a MODE SELECT's parameter list, after the header and the block descriptors.
///
/// # Errors
/// The list ends within the header or the descriptors.
pub fn pages_of_list(list: &[u8], ten: bool) -> Result<&[u8], DecodeError> {
    const WHAT: &str = "mode parameter header";
    let header = if ten { 8 } else { 4 };
    let short = |need| DecodeError::Length { what: WHAT, got: list.len(), need };
    if list.len() < header {
        return Err(short(header));
    }
    let descriptors = if ten { usize::from(be16(list, 6)) } else { list[3].into() };
    list.get(header + descriptors..).ok_or(short(header + descriptors))
}

/// A mode page in a parameter list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModePage<'a> {
    /// Page code.
    pub page: u8,
    /// Subpage code, 0 of the page itself.
    pub subpage: u8,
    /// Its bytes, header included.
    pub bytes: &'a [u8],
}

impl<'a> ModePage<'a> {
    /// Decodes the page at the start of `list`, which is not empty. Returns the rest of the list.
    ///
    /// # Errors
    /// The page is cut off.
    pub fn decode(list: &'a [u8]) -> Result<(ModePage<'a>, &'a [u8]), DecodeError> {
        const WHAT: &str = "mode page";
        let short = |need| DecodeError::Length { what: WHAT, got: list.len(), need };
        let code = *list.first().ok_or(short(2))?;
        let has_subpage = code & 0x40 != 0;
        let header = if has_subpage { 4 } else { 2 };
        if list.len() < header {
            return Err(short(header));
        }
        let (subpage, length) = match has_subpage {
            true => (list[1], usize::from(be16(list, 2))),
            false => (0, list[1].into()),
        };
        let (bytes, rest) = list.split_at_checked(header + length).ok_or(short(header + length))?;
        Ok((ModePage { page: code & 0x3f, subpage, bytes }, rest))
    }
}

/// What can be changed in mode pages, as they are in force.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModeSettings {
    /// WCE of the caching page: writes may complete before they are on the medium.
    pub write_cache: bool,
    /// D_SENSE of the control page: sense data has descriptor format.
    pub descriptor_sense: bool,
    /// SWP of the control page: the unit is write-protected.
    pub write_protect: bool,
}

impl ModeSettings {
    /// Encodes a page; `None` if it is unknown. As a mask, it has the bits of these settings alone; otherwise also those
    /// of what cannot be changed: commands may be reordered without restriction.
    pub fn encode(&self, page: u8, subpage: u8, is_mask: bool) -> Option<Vec<u8>> {
        let mut bytes = match (page, subpage) {
            (page::ERROR_RECOVERY, 0) => vec![0; 12],
            (page::DISCONNECT, 0) => vec![0; 16],
            (page::CACHING, 0) => vec![0; 20],
            (page::CONTROL, 0) => vec![0; 12],
            (page::CONTROL, 1) => vec![0; 32],
            (page::EXCEPTIONS, 0) => vec![0; 12],
            _ => return None,
        };
        bytes[0] = page;
        if subpage == 0 {
            bytes[1] = bytes.len() as u8 - 2;
        } else {
            (bytes[0], bytes[1], bytes[3]) = (page | 0x40, subpage, bytes.len() as u8 - 4);
        }
        match (page, subpage) {
            (page::CACHING, 0) => bytes[2] = u8::from(self.write_cache) << 2,
            (page::CONTROL, 0) => {
                bytes[2] = u8::from(self.descriptor_sense) << 2;
                bytes[3] = u8::from(!is_mask) << 4;
                bytes[4] = u8::from(self.write_protect) << 3;
            }
            _ => {}
        }
        Some(bytes)
    }

    /// The settings in a page of a parameter list; those of other pages are as in `self`.
    pub fn with_page(&self, page: &ModePage<'_>) -> ModeSettings {
        let bit = |at: usize, bit: u8| page.bytes.get(at).is_some_and(|byte| byte >> bit & 1 != 0);
        match (page.page, page.subpage) {
            (page::CACHING, 0) => ModeSettings { write_cache: bit(2, 2), ..*self },
            (page::CONTROL, 0) => {
                ModeSettings { descriptor_sense: bit(2, 2), write_protect: bit(4, 3), ..*self }
            }
            _ => *self,
        }
    }
}
