//! INQUIRY data and vital product data pages (SPC-4, sections 6.6 and 7.8; SBC-4, section 6.6).

#[cfg(test)]
mod tests;

/// A peripheral qualifier and device type: a disk that is there.
pub const DISK: u8 = 0x00;
/// No logical unit is possible at this number.
pub const NO_UNIT: u8 = 0x7f;

/// Vital product data pages.
pub mod page {
    /// Supported pages.
    pub const SUPPORTED: u8 = 0x00;
    /// Unit serial number.
    pub const SERIAL: u8 = 0x80;
    /// Device identification.
    pub const IDENTIFICATION: u8 = 0x83;
    /// Management network addresses.
    pub const NETWORK_ADDRESSES: u8 = 0x85;
    /// Extended INQUIRY data.
    pub const EXTENDED: u8 = 0x86;
    /// Mode page policy.
    pub const MODE_POLICY: u8 = 0x87;
    /// Block limits.
    pub const BLOCK_LIMITS: u8 = 0xb0;
    /// Block device characteristics.
    pub const CHARACTERISTICS: u8 = 0xb1;
    /// Logical block provisioning.
    pub const PROVISIONING: u8 = 0xb2;
}

/// A transport, as PROTOCOL IDENTIFIER names it (SPC-4, section 7.6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ProtocolId {
    /// SRP, which virtio-scsi targets use.
    Srp = 0x4,
    /// iSCSI.
    Iscsi = 0x5,
    /// None of those that have a number.
    None = 0xf,
}

/// Standard INQUIRY data.
#[derive(Clone, Copy, Debug)]
pub struct StandardInquiry<'a> {
    /// Peripheral qualifier and device type.
    pub peripheral: u8,
    /// TPGS: 0 none, 1 implicit, 2 explicit, 3 both.
    pub port_groups: u8,
    /// 3PC: it executes third-party copies.
    pub third_party_copy: bool,
    /// MULTIP: there may be several target ports.
    pub multiple_ports: bool,
    /// T10 VENDOR IDENTIFICATION, padded with spaces.
    pub vendor: &'a str,
    /// PRODUCT IDENTIFICATION, padded with spaces.
    pub product: &'a str,
    /// PRODUCT REVISION LEVEL, padded with spaces.
    pub revision: &'a str,
    /// VERSION DESCRIPTORs, at most eight.
    pub versions: &'a [u16],
}

/// Version descriptors (SPC-4, annex D.10).
pub mod version {
    /// SAM-5.
    pub const SAM_5: u16 = 0x00a0;
    /// SPC-4.
    pub const SPC_4: u16 = 0x0460;
    /// SBC-3.
    pub const SBC_3: u16 = 0x04c0;
    /// iSCSI.
    pub const ISCSI: u16 = 0x0960;
}

/// Bytes of standard INQUIRY data: all fields that are not vendor-specific.
pub const STANDARD_BYTES: usize = 96;

impl StandardInquiry<'_> {
    /// Encodes the data.
    pub fn encode(&self) -> [u8; STANDARD_BYTES] {
        let mut bytes = [0; STANDARD_BYTES];
        bytes[0] = self.peripheral;
        // SPC-4.
        bytes[2] = 0x06;
        // HISUP, response data format 2.
        bytes[3] = 0x12;
        bytes[4] = (STANDARD_BYTES - 5) as u8;
        bytes[5] = (self.port_groups & 3) << 4 | u8::from(self.third_party_copy) << 3;
        bytes[6] = u8::from(self.multiple_ports) << 4;
        // CMDQUE.
        bytes[7] = 0x02;
        put_text(&mut bytes[8..16], self.vendor);
        put_text(&mut bytes[16..32], self.product);
        put_text(&mut bytes[32..36], self.revision);
        for (place, version) in bytes[58..74].chunks_exact_mut(2).zip(self.versions) {
            place.copy_from_slice(&version.to_be_bytes());
        }
        bytes
    }
}

/// Writes the printable ASCII characters of a text, padded with spaces.
pub fn put_text(place: &mut [u8], text: &str) {
    place.fill(b' ');
    let printable = text.bytes().map(|byte| if (0x20..0x7f).contains(&byte) { byte } else { b'?' });
    place.iter_mut().zip(printable).for_each(|(place, byte)| *place = byte);
}

/// A vital product data page.
pub fn vpd_page(peripheral: u8, page: u8, content: &[u8]) -> Vec<u8> {
    let [high, low] = (content.len() as u16).to_be_bytes();
    [&[peripheral, page, high, low], content].concat()
}

/// What a designator identifies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Association {
    /// The logical unit.
    Unit = 0,
    /// The target port that received the command.
    Port = 1,
    /// The target device.
    Device = 2,
}

/// A designator of the device identification page (SPC-4, section 7.8.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Designator<'a> {
    /// T10 vendor ID and what the vendor appends.
    T10(&'a str, &'a str),
    /// A locally assigned NAA identifier: 60 bits.
    LocalNaa(u64),
    /// A UUID (SPC-5).
    Uuid([u8; 16]),
    /// Relative target port identifier.
    RelativePort(u16),
    /// Target port group.
    PortGroup(u16),
    /// SCSI name string.
    Name(&'a str),
}

const CODE_BINARY: u8 = 1;
const CODE_ASCII: u8 = 2;
const CODE_UTF8: u8 = 3;
const PROTOCOL_VALID: u8 = 0x80;
/// Longest SCSI name string.
const NAME_BYTES_MAX: usize = 252;

impl Designator<'_> {
    /// Appends the designation descriptor. Those of ports and devices name their protocol.
    pub fn encode(&self, association: Association, protocol: ProtocolId, out: &mut Vec<u8>) {
        let (code, kind, content) = match *self {
            Designator::T10(vendor, name) => {
                let mut content = vec![0; 8];
                put_text(&mut content, vendor);
                content.extend_from_slice(name.as_bytes());
                (CODE_ASCII, 1, content)
            }
            Designator::LocalNaa(id) => {
                (CODE_BINARY, 3, (0x3 << 60 | id & (u64::MAX >> 4)).to_be_bytes().to_vec())
            }
            Designator::Uuid(uuid) => (CODE_BINARY, 0xa, [&[0x10, 0], &uuid[..]].concat()),
            Designator::RelativePort(port) => (CODE_BINARY, 4, [[0; 2], port.to_be_bytes()].concat()),
            Designator::PortGroup(group) => (CODE_BINARY, 5, [[0; 2], group.to_be_bytes()].concat()),
            Designator::Name(name) => (CODE_UTF8, 8, name_string(name)),
        };
        let has_protocol = association != Association::Unit;
        let identifier = if has_protocol { (protocol as u8) << 4 } else { 0 };
        let valid = if has_protocol { PROTOCOL_VALID } else { 0 };
        out.extend([identifier | code, valid | (association as u8) << 4 | kind, 0, content.len() as u8]);
        out.extend(content);
    }
}

/// A name, terminated and padded with zeroes to a multiple of four bytes.
fn name_string(name: &str) -> Vec<u8> {
    let mut end = name.len().min(NAME_BYTES_MAX - 1);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    let mut content = name.as_bytes()[..end].to_vec();
    content.resize((end + 1).next_multiple_of(4), 0);
    content
}

/// The block limits page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockLimits {
    /// WSNZ: a WRITE SAME of 0 blocks is invalid.
    pub write_same_nonzero: bool,
    /// MAXIMUM COMPARE AND WRITE LENGTH in blocks; 0: not supported.
    pub compare_and_write_blocks: u8,
    /// OPTIMAL TRANSFER LENGTH GRANULARITY in blocks; 0: not reported.
    pub optimal_granularity_blocks: u16,
    /// MAXIMUM TRANSFER LENGTH in blocks.
    pub transfer_blocks: u32,
    /// OPTIMAL TRANSFER LENGTH in blocks.
    pub optimal_transfer_blocks: u32,
    /// MAXIMUM UNMAP LBA COUNT; 0: not supported.
    pub unmap_blocks: u32,
    /// MAXIMUM UNMAP BLOCK DESCRIPTOR COUNT.
    pub unmap_descriptors: u32,
    /// OPTIMAL UNMAP GRANULARITY in blocks; 0: not reported.
    pub unmap_granularity_blocks: u32,
    /// MAXIMUM WRITE SAME LENGTH in blocks.
    pub write_same_blocks: u64,
    /// MAXIMUM ATOMIC TRANSFER LENGTH in blocks; 0: not supported.
    pub atomic_blocks: u32,
    /// ATOMIC ALIGNMENT and ATOMIC TRANSFER LENGTH GRANULARITY in blocks; 0: any length, anywhere.
    pub atomic_unit_blocks: u32,
}

impl BlockLimits {
    /// The content of the page.
    pub fn encode(&self) -> [u8; 60] {
        let mut page = [0; 64];
        page[4] = u8::from(self.write_same_nonzero);
        page[5] = self.compare_and_write_blocks;
        page[6..8].copy_from_slice(&self.optimal_granularity_blocks.to_be_bytes());
        page[8..12].copy_from_slice(&self.transfer_blocks.to_be_bytes());
        page[12..16].copy_from_slice(&self.optimal_transfer_blocks.to_be_bytes());
        page[20..24].copy_from_slice(&self.unmap_blocks.to_be_bytes());
        page[24..28].copy_from_slice(&self.unmap_descriptors.to_be_bytes());
        page[28..32].copy_from_slice(&self.unmap_granularity_blocks.to_be_bytes());
        if self.unmap_granularity_blocks > 0 {
            // UGAVALID, alignment 0.
            page[32] = 0x80;
        }
        page[36..44].copy_from_slice(&self.write_same_blocks.to_be_bytes());
        page[44..48].copy_from_slice(&self.atomic_blocks.to_be_bytes());
        page[48..52].copy_from_slice(&self.atomic_unit_blocks.to_be_bytes());
        page[52..56].copy_from_slice(&self.atomic_unit_blocks.to_be_bytes());
        // There is no ATOMIC BOUNDARY.
        let mut content = [0; 60];
        content.copy_from_slice(&page[4..]);
        content
    }
}

/// The logical block provisioning page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Provisioning {
    /// LBPU: UNMAP is supported.
    pub unmap: bool,
    /// LBPWS and LBPWS10: WRITE SAME with UNMAP is supported.
    pub write_same: bool,
    /// LBPRZ: deallocated blocks read as zeroes.
    pub reads_zeroes: bool,
    /// Thinly provisioned, not fully.
    pub thin: bool,
}

impl Provisioning {
    /// The content of the page.
    pub fn encode(&self) -> [u8; 4] {
        let unmap = u8::from(self.unmap) << 7;
        let write_same = u8::from(self.write_same) * 0x60;
        let kind = if self.thin { 2 } else { 0 };
        [0, unmap | write_same | u8::from(self.reads_zeroes) << 2, kind, 0]
    }
}

/// Content of the block device characteristics page of a device that does not rotate and obeys FUA. `block_erase` says
/// whether SANITIZE can erase it; its blocks can be read afterwards then (WABEREQ 01b).
pub fn characteristics(block_erase: bool) -> [u8; 60] {
    let mut content = [0; 60];
    // MEDIUM ROTATION RATE 1: not rotating.
    content[1] = 1;
    content[3] = u8::from(block_erase) << 6;
    // FUAB: SYNCHRONIZE CACHE and FUA behave as SBC-4 says.
    content[4] = 0x02;
    content
}

/// Content of the extended INQUIRY data page: simple tasks only, and the cache may be volatile.
pub fn extended(volatile_cache: bool) -> [u8; 60] {
    let mut content = [0; 60];
    // SIMPSUP.
    content[1] = 0x01;
    // V_SUP.
    content[2] = u8::from(volatile_cache);
    // LUICLR: nexus loss clears unit attentions of that nexus.
    content[3] = 0x01;
    content
}

/// Content of the mode page policy page: all pages are shared by all nexuses.
pub const MODE_POLICY_SHARED: [u8; 4] = [0x3f, 0xff, 0x00, 0x00];
