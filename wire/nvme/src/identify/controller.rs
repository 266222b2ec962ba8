//! Identify Controller (CNS 01h) and its NVM command set part (CNS 06h).

use super::{ControllerType, DiscoveryType, SIZE};
use crate::DecodeError;
use crate::le::{array_at, put, put16, put32, put64, u16_at, u32_at, u64_at};
use crate::registers::NvmeVersion;

/// Bits of CMIC: multi-path and sharing.
pub mod cmic {
    /// The subsystem may have several ports.
    pub const MULTIPLE_PORTS: u8 = 1 << 0;
    /// The subsystem may have several controllers.
    pub const MULTIPLE_CONTROLLERS: u8 = 1 << 1;
    /// Asymmetric namespace access is reported.
    pub const ANA: u8 = 1 << 3;
}

/// Bits of OAES: optional asynchronous events. They are the bits of Asynchronous Event Configuration.
pub mod oaes {
    /// Namespace Attribute Notices.
    pub const NAMESPACE: u32 = 1 << 8;
    /// Firmware Activation Notices.
    pub const FIRMWARE: u32 = 1 << 9;
    /// Asymmetric Namespace Access Change Notices.
    pub const ANA: u32 = 1 << 11;
    /// Discovery Log Page Change Notices.
    pub const DISCOVERY: u32 = 1 << 31;
}

/// Bits of CTRATT: controller attributes.
pub mod ctratt {
    /// 128-bit host identifiers.
    pub const HOST_ID_128: u32 = 1 << 0;
    /// Traffic based keep alive.
    pub const TRAFFIC_KEEP_ALIVE: u32 = 1 << 6;
    /// Extended LBA formats (ELBAS): protection information with guards of 32 and 64 bits, and storage tags.
    pub const EXTENDED_FORMATS: u32 = 1 << 15;
}

/// Bits of OACS: optional admin commands.
pub mod oacs {
    /// Security Send and Receive.
    pub const SECURITY: u16 = 1 << 0;
    /// Format NVM.
    pub const FORMAT: u16 = 1 << 1;
    /// Firmware Commit and Download.
    pub const FIRMWARE: u16 = 1 << 2;
    /// Namespace Management and Attachment.
    pub const NAMESPACE_MANAGEMENT: u16 = 1 << 3;
    /// Doorbell Buffer Config.
    pub const DOORBELL_BUFFER: u16 = 1 << 8;
}

/// Bits of LPA: log page attributes.
pub mod lpa {
    /// SMART / Health Information per namespace.
    pub const HEALTH_PER_NAMESPACE: u8 = 1 << 0;
    /// Commands Supported and Effects.
    pub const COMMAND_EFFECTS: u8 = 1 << 1;
    /// Extended data for Get Log Page: 32-bit lengths and offsets.
    pub const EXTENDED: u8 = 1 << 2;
    /// Persistent Event log.
    pub const PERSISTENT_EVENTS: u8 = 1 << 4;
    /// Supported Log Pages, Feature Identifiers Effects, and the rest of those.
    pub const MISCELLANEOUS: u8 = 1 << 5;
}

/// Bits of ONCS: optional NVM commands.
pub mod oncs {
    /// Compare.
    pub const COMPARE: u16 = 1 << 0;
    /// Write Uncorrectable.
    pub const WRITE_UNCORRECTABLE: u16 = 1 << 1;
    /// Dataset Management.
    pub const DATASET_MANAGEMENT: u16 = 1 << 2;
    /// Write Zeroes.
    pub const WRITE_ZEROES: u16 = 1 << 3;
    /// Save and Select in features.
    pub const SAVE_AND_SELECT: u16 = 1 << 4;
    /// Reservations.
    pub const RESERVATIONS: u16 = 1 << 5;
    /// Timestamp.
    pub const TIMESTAMP: u16 = 1 << 6;
    /// Verify.
    pub const VERIFY: u16 = 1 << 7;
    /// Copy.
    pub const COPY: u16 = 1 << 8;
}

/// Bits of FUSES: fused operations.
pub mod fuses {
    /// Compare and Write.
    pub const COMPARE_AND_WRITE: u16 = 1 << 0;
}

/// Bits of OCFS: formats of Copy's source ranges.
pub mod ocfs {
    /// Format 0.
    pub const FORMAT_0: u16 = 1 << 0;
}

/// Bits of VWC: volatile write cache.
pub mod vwc {
    /// A volatile write cache is present.
    pub const PRESENT: u8 = 1 << 0;
    /// Flush of all namespaces is not supported.
    pub const FLUSH_ALL_UNSUPPORTED: u8 = 2 << 1;
    /// Flush of all namespaces is supported.
    pub const FLUSH_ALL: u8 = 3 << 1;
}

/// Bits of SGLS: SGL support.
pub mod sgls {
    /// SGLs without alignment or granularity requirements.
    pub const SUPPORTED: u32 = 1 << 0;
    /// Keyed Data Block descriptors.
    pub const KEYED: u32 = 1 << 2;
    /// Bit Bucket descriptors.
    pub const BIT_BUCKET: u32 = 1 << 16;
    /// SGLs longer than the data.
    pub const OVERSIZED: u32 = 1 << 18;
    /// Data Block descriptors with an offset.
    pub const OFFSET: u32 = 1 << 20;
    /// Transport Data Block descriptors.
    pub const TRANSPORT: u32 = 1 << 21;
}

/// Bits of ANACAP.
pub mod anacap {
    /// The optimized state is reported.
    pub const OPTIMIZED: u8 = 1 << 0;
    /// The non-optimized state is reported.
    pub const NON_OPTIMIZED: u8 = 1 << 1;
    /// The inaccessible state is reported.
    pub const INACCESSIBLE: u8 = 1 << 2;
    /// The persistent loss state is reported.
    pub const PERSISTENT_LOSS: u8 = 1 << 3;
    /// The change state is reported.
    pub const CHANGE: u8 = 1 << 4;
    /// ANAGRPID does not change while the namespace is attached.
    pub const GROUP_FIXED: u8 = 1 << 6;
}

/// Identify Controller (Base 2.0, section 5.17.2.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentifyController {
    /// PCI vendor.
    pub vid: u16,
    /// PCI subsystem vendor.
    pub ssvid: u16,
    /// Serial number, padded with spaces.
    pub sn: [u8; 20],
    /// Model number, padded with spaces.
    pub mn: [u8; 40],
    /// Firmware revision, padded with spaces.
    pub fr: [u8; 8],
    /// Recommended arbitration burst, as a power of two.
    pub rab: u8,
    /// IEEE OUI Identifier, in the byte order of the structure.
    pub ieee: [u8; 3],
    /// Multi-path and sharing; see [`cmic`].
    pub cmic: u8,
    /// Largest transfer as a power of two of CAP.MPSMIN pages; 0 for no limit.
    pub mdts: u8,
    /// Controller identifier.
    pub cntlid: u16,
    /// Version.
    pub ver: NvmeVersion,
    /// Resume latency from D3 in microseconds.
    pub rtd3r_us: u32,
    /// RTD3 entry latency in microseconds; also the maximum time of a shutdown.
    pub rtd3e_us: u32,
    /// Optional asynchronous events; see [`oaes`].
    pub oaes: u32,
    /// Controller attributes; see [`ctratt`].
    pub ctratt: u32,
    /// Controller type.
    pub cntrltype: ControllerType,
    /// FRU globally unique identifier.
    pub fguid: [u8; 16],
    /// Command retry delay times 1 to 3, in units of 100 ms.
    pub crdt_100ms: [u16; 3],
    /// Optional admin commands; see [`oacs`].
    pub oacs: u16,
    /// Abort Command Limit (ACL), 1 to 256.
    pub aborts_max: u16,
    /// Asynchronous Event Request Limit (AERL), 1 to 256.
    pub async_events_max: u16,
    /// Firmware updates.
    pub frmw: u8,
    /// Log page attributes; see [`lpa`].
    pub lpa: u8,
    /// Entries of the error log (ELPE), 1 to 256.
    pub error_log_entries: u16,
    /// Power states (NPSS), 1 to 32.
    pub power_states: u8,
    /// Warning composite temperature in kelvins.
    pub wctemp: u16,
    /// Critical composite temperature in kelvins.
    pub cctemp: u16,
    /// Total capacity in bytes.
    pub tnvmcap: u128,
    /// Unallocated capacity in bytes.
    pub unvmcap: u128,
    /// Keep alive granularity in units of 100 ms; 0 for not supported.
    pub kas_100ms: u16,
    /// ANA Transition Time (ANATT) in seconds.
    pub anatt_s: u8,
    /// ANA capabilities; see [`anacap`].
    pub anacap: u8,
    /// Largest ANA group identifier.
    pub anagrpmax: u32,
    /// Number of ANA groups.
    pub nanagrpid: u32,
    /// Largest Persistent Event log (PELS) in units of 64 KiB; 0 for none.
    pub persistent_events_64kib: u32,
    /// Submission queue entry size as powers of two: required in the low nibble, maximum in the high one.
    pub sqes: u8,
    /// Completion queue entry size, in the same form.
    pub cqes: u8,
    /// Maximum Outstanding Commands (MAXCMD); 0 if a memory-based transport does not report it.
    pub maxcmd: u16,
    /// Largest namespace identifier that is valid.
    pub nn: u32,
    /// Optional NVM commands; see [`oncs`].
    pub oncs: u16,
    /// Fused operations; see [`fuses`].
    pub fuses: u16,
    /// Format NVM attributes.
    pub fna: u8,
    /// Volatile write cache; see [`vwc`].
    pub vwc: u8,
    /// Atomic Write Unit Normal (AWUN) in blocks, 1 to 65536.
    pub atomic_write_blocks: u32,
    /// Atomic Write Unit Power Fail (AWUPF) in blocks, 1 to 65536.
    pub atomic_write_power_fail_blocks: u32,
    /// Atomic Compare & Write Unit (ACWU) in blocks, 1 to 65536.
    pub atomic_compare_write_blocks: u32,
    /// Formats of Copy's source ranges; see [`ocfs`].
    pub ocfs: u16,
    /// SGL support; see [`sgls`].
    pub sgls: u32,
    /// Largest number of namespaces; 0 for `nn`.
    pub mnan: u32,
    /// Subsystem name; the field is padded with zeroes.
    pub subnqn: String,
    /// Largest I/O command capsule in bytes (IOCCSZ), a multiple of 16.
    pub io_command_capsule_bytes: u32,
    /// Largest I/O response capsule in bytes (IORCSZ), a multiple of 16.
    pub io_response_capsule_bytes: u32,
    /// In-capsule data offset (ICDOFF) in bytes, a multiple of 16.
    pub in_capsule_offset_bytes: u32,
    /// Fabrics controller attributes: bit 0, the static controller model.
    pub fcatt: u8,
    /// Largest number of SGL Data Block descriptors; 0 for no limit.
    pub msdbd: u8,
    /// Optional fabrics commands: bit 0, Disconnect.
    pub ofcs: u16,
    /// Discovery controller type.
    pub dctype: DiscoveryType,
}

impl Default for IdentifyController {
    /// All zero, except for fields with a minimum of 1.
    fn default() -> Self {
        let mut zero = [0; SIZE];
        zero[at::SN..at::SN + 68].fill(b' ');
        IdentifyController::decode(&zero).expect("zeroes are an Identify Controller structure")
    }
}

mod at {
    pub(super) const VID: usize = 0;
    pub(super) const SSVID: usize = 2;
    pub(super) const SN: usize = 4;
    pub(super) const MN: usize = 24;
    pub(super) const FR: usize = 64;
    pub(super) const RAB: usize = 72;
    pub(super) const IEEE: usize = 73;
    pub(super) const CMIC: usize = 76;
    pub(super) const MDTS: usize = 77;
    pub(super) const CNTLID: usize = 78;
    pub(super) const VER: usize = 80;
    pub(super) const RTD3R: usize = 84;
    pub(super) const RTD3E: usize = 88;
    pub(super) const OAES: usize = 92;
    pub(super) const CTRATT: usize = 96;
    pub(super) const CNTRLTYPE: usize = 111;
    pub(super) const FGUID: usize = 112;
    pub(super) const CRDT: usize = 128;
    pub(super) const OACS: usize = 256;
    pub(super) const ACL: usize = 258;
    pub(super) const AERL: usize = 259;
    pub(super) const FRMW: usize = 260;
    pub(super) const LPA: usize = 261;
    pub(super) const ELPE: usize = 262;
    pub(super) const NPSS: usize = 263;
    pub(super) const WCTEMP: usize = 266;
    pub(super) const CCTEMP: usize = 268;
    pub(super) const TNVMCAP: usize = 280;
    pub(super) const UNVMCAP: usize = 296;
    pub(super) const KAS: usize = 320;
    pub(super) const ANATT: usize = 342;
    pub(super) const ANACAP: usize = 343;
    pub(super) const ANAGRPMAX: usize = 344;
    pub(super) const NANAGRPID: usize = 348;
    pub(super) const PELS: usize = 352;
    pub(super) const SQES: usize = 512;
    pub(super) const CQES: usize = 513;
    pub(super) const MAXCMD: usize = 514;
    pub(super) const NN: usize = 516;
    pub(super) const ONCS: usize = 520;
    pub(super) const FUSES: usize = 522;
    pub(super) const FNA: usize = 524;
    pub(super) const VWC: usize = 525;
    pub(super) const AWUN: usize = 526;
    pub(super) const AWUPF: usize = 528;
    pub(super) const ACWU: usize = 532;
    pub(super) const OCFS: usize = 534;
    pub(super) const SGLS: usize = 536;
    pub(super) const MNAN: usize = 540;
    pub(super) const SUBNQN: usize = 768;
    pub(super) const IOCCSZ: usize = 1792;
    pub(super) const IORCSZ: usize = 1796;
    pub(super) const ICDOFF: usize = 1800;
    pub(super) const FCATT: usize = 1802;
    pub(super) const MSDBD: usize = 1803;
    pub(super) const OFCS: usize = 1804;
    pub(super) const DCTYPE: usize = 1806;
}

const SUBNQN_SIZE: usize = 256;
/// Unit in bytes of IOCCSZ, IORCSZ and ICDOFF.
const CAPSULE_UNIT: u32 = 16;

const _: () = assert!(at::DCTYPE < SIZE && at::SUBNQN + SUBNQN_SIZE == 1024);

impl IdentifyController {
    /// Decodes the structure.
    ///
    /// # Errors
    /// Reserved controller types, too many power states, capsule sizes above 4 GiB, and a subsystem NQN
    /// that is not UTF-8.
    pub fn decode(from: &[u8; SIZE]) -> Result<IdentifyController, DecodeError> {
        let error = |what, at: usize, value| DecodeError::value(what, at as u32, value);
        let capsule = |what, at| {
            let units = u32_at(from, at);
            units.checked_mul(CAPSULE_UNIT).ok_or(error(what, at, units.into()))
        };
        let name: [u8; SUBNQN_SIZE] = array_at(from, at::SUBNQN);
        let end = name.iter().position(|&byte| byte == 0);
        let end = end.ok_or(error("SUBNQN", at::SUBNQN, SUBNQN_SIZE as u64))?;
        let subnqn = std::str::from_utf8(&name[..end])
            .map_err(|bad| error("SUBNQN", at::SUBNQN, bad.valid_up_to() as u64))?;
        let npss = from[at::NPSS];
        if npss > 31 {
            return Err(error("NPSS", at::NPSS, npss.into()));
        }
        let kind = from[at::CNTRLTYPE];
        let discovery = from[at::DCTYPE];
        Ok(IdentifyController {
            vid: u16_at(from, at::VID),
            ssvid: u16_at(from, at::SSVID),
            sn: array_at(from, at::SN),
            mn: array_at(from, at::MN),
            fr: array_at(from, at::FR),
            rab: from[at::RAB],
            ieee: array_at(from, at::IEEE),
            cmic: from[at::CMIC],
            mdts: from[at::MDTS],
            cntlid: u16_at(from, at::CNTLID),
            ver: NvmeVersion::decode(u32_at(from, at::VER)),
            rtd3r_us: u32_at(from, at::RTD3R),
            rtd3e_us: u32_at(from, at::RTD3E),
            oaes: u32_at(from, at::OAES),
            ctratt: u32_at(from, at::CTRATT),
            cntrltype: ControllerType::from_wire(kind).ok_or(error(
                "CNTRLTYPE",
                at::CNTRLTYPE,
                kind.into(),
            ))?,
            fguid: array_at(from, at::FGUID),
            crdt_100ms: [0, 2, 4].map(|offset| u16_at(from, at::CRDT + offset)),
            oacs: u16_at(from, at::OACS),
            aborts_max: u16::from(from[at::ACL]) + 1,
            async_events_max: u16::from(from[at::AERL]) + 1,
            frmw: from[at::FRMW],
            lpa: from[at::LPA],
            error_log_entries: u16::from(from[at::ELPE]) + 1,
            power_states: npss + 1,
            wctemp: u16_at(from, at::WCTEMP),
            cctemp: u16_at(from, at::CCTEMP),
            tnvmcap: crate::le::u128_at(from, at::TNVMCAP),
            unvmcap: crate::le::u128_at(from, at::UNVMCAP),
            kas_100ms: u16_at(from, at::KAS),
            anatt_s: from[at::ANATT],
            anacap: from[at::ANACAP],
            anagrpmax: u32_at(from, at::ANAGRPMAX),
            nanagrpid: u32_at(from, at::NANAGRPID),
            persistent_events_64kib: u32_at(from, at::PELS),
            sqes: from[at::SQES],
            cqes: from[at::CQES],
            maxcmd: u16_at(from, at::MAXCMD),
            nn: u32_at(from, at::NN),
            oncs: u16_at(from, at::ONCS),
            fuses: u16_at(from, at::FUSES),
            fna: from[at::FNA],
            vwc: from[at::VWC],
            atomic_write_blocks: u32::from(u16_at(from, at::AWUN)) + 1,
            atomic_write_power_fail_blocks: u32::from(u16_at(from, at::AWUPF)) + 1,
            atomic_compare_write_blocks: u32::from(u16_at(from, at::ACWU)) + 1,
            ocfs: u16_at(from, at::OCFS),
            sgls: u32_at(from, at::SGLS),
            mnan: u32_at(from, at::MNAN),
            subnqn: subnqn.to_owned(),
            io_command_capsule_bytes: capsule("IOCCSZ", at::IOCCSZ)?,
            io_response_capsule_bytes: capsule("IORCSZ", at::IORCSZ)?,
            in_capsule_offset_bytes: u32::from(u16_at(from, at::ICDOFF)) * CAPSULE_UNIT,
            fcatt: from[at::FCATT],
            msdbd: from[at::MSDBD],
            ofcs: u16_at(from, at::OFCS),
            dctype: DiscoveryType::from_wire(discovery).ok_or(error(
                "DCTYPE",
                at::DCTYPE,
                discovery.into(),
            ))?,
        })
    }

    /// Encodes the structure.
    ///
    /// # Panics
    /// If a field is out of the range given in its documentation, or the subsystem NQN is too long.
    pub fn encode(&self, into: &mut [u8; SIZE]) {
        *into = [0; SIZE];
        put16(into, at::VID, self.vid);
        put16(into, at::SSVID, self.ssvid);
        put(into, at::SN, &self.sn);
        put(into, at::MN, &self.mn);
        put(into, at::FR, &self.fr);
        into[at::RAB] = self.rab;
        put(into, at::IEEE, &self.ieee);
        into[at::CMIC] = self.cmic;
        into[at::MDTS] = self.mdts;
        put16(into, at::CNTLID, self.cntlid);
        put32(into, at::VER, self.ver.encode());
        put32(into, at::RTD3R, self.rtd3r_us);
        put32(into, at::RTD3E, self.rtd3e_us);
        put32(into, at::OAES, self.oaes);
        put32(into, at::CTRATT, self.ctratt);
        into[at::CNTRLTYPE] = self.cntrltype.to_wire();
        put(into, at::FGUID, &self.fguid);
        for (index, &delay) in self.crdt_100ms.iter().enumerate() {
            put16(into, at::CRDT + 2 * index, delay);
        }
        put16(into, at::OACS, self.oacs);
        into[at::ACL] = zero_based(self.aborts_max);
        into[at::AERL] = zero_based(self.async_events_max);
        into[at::FRMW] = self.frmw;
        into[at::LPA] = self.lpa;
        into[at::ELPE] = zero_based(self.error_log_entries);
        assert!((1..=32).contains(&self.power_states), "{} power states", self.power_states);
        into[at::NPSS] = self.power_states - 1;
        put16(into, at::WCTEMP, self.wctemp);
        put16(into, at::CCTEMP, self.cctemp);
        put(into, at::TNVMCAP, &self.tnvmcap.to_le_bytes());
        put(into, at::UNVMCAP, &self.unvmcap.to_le_bytes());
        put16(into, at::KAS, self.kas_100ms);
        into[at::ANATT] = self.anatt_s;
        into[at::ANACAP] = self.anacap;
        put32(into, at::ANAGRPMAX, self.anagrpmax);
        put32(into, at::NANAGRPID, self.nanagrpid);
        put32(into, at::PELS, self.persistent_events_64kib);
        into[at::SQES] = self.sqes;
        into[at::CQES] = self.cqes;
        put16(into, at::MAXCMD, self.maxcmd);
        put32(into, at::NN, self.nn);
        put16(into, at::ONCS, self.oncs);
        put16(into, at::FUSES, self.fuses);
        into[at::FNA] = self.fna;
        into[at::VWC] = self.vwc;
        put16(into, at::AWUN, super::namespace::zero_based_blocks(self.atomic_write_blocks));
        put16(into, at::AWUPF, super::namespace::zero_based_blocks(self.atomic_write_power_fail_blocks));
        put16(into, at::ACWU, super::namespace::zero_based_blocks(self.atomic_compare_write_blocks));
        put16(into, at::OCFS, self.ocfs);
        put32(into, at::SGLS, self.sgls);
        put32(into, at::MNAN, self.mnan);
        assert!(self.subnqn.len() < SUBNQN_SIZE, "a subsystem name of {} bytes", self.subnqn.len());
        put(into, at::SUBNQN, self.subnqn.as_bytes());
        put32(into, at::IOCCSZ, units(self.io_command_capsule_bytes));
        put32(into, at::IORCSZ, units(self.io_response_capsule_bytes));
        let offset = u16::try_from(units(self.in_capsule_offset_bytes));
        put16(into, at::ICDOFF, offset.expect("in-capsule data starts within 1 MiB"));
        into[at::FCATT] = self.fcatt;
        into[at::MSDBD] = self.msdbd;
        put16(into, at::OFCS, self.ofcs);
        into[at::DCTYPE] = self.dctype.to_wire();
    }
}

fn zero_based(count: u16) -> u8 {
    assert!((1..=256).contains(&count), "{count} is not 1 to 256");
    (count - 1) as u8
}

fn units(bytes: u32) -> u32 {
    assert!(bytes.is_multiple_of(CAPSULE_UNIT), "{bytes} bytes are not a multiple of {CAPSULE_UNIT}");
    bytes / CAPSULE_UNIT
}

/// Identify Controller of the NVM command set (CNS 06h, CSI 00h; NVM 1.0, section 4.1.5.2).
///
/// Sizes are powers of two of CAP.MPSMIN pages, 0 for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NvmController {
    /// Verify size limit.
    pub vsl: u8,
    /// Write Zeroes size limit.
    pub wzsl: u8,
    /// Write Uncorrectable size limit.
    pub wusl: u8,
    /// Dataset Management ranges limit; 0 for none.
    pub dmrl: u8,
    /// Dataset Management range size limit in blocks; 0 for none.
    pub dmrsl: u32,
    /// Dataset Management size limit in blocks; 0 for none.
    pub dmsl: u64,
}

impl NvmController {
    /// Decodes 4096 bytes; every value is valid.
    pub fn decode(from: &[u8; SIZE]) -> NvmController {
        NvmController {
            vsl: from[0],
            wzsl: from[1],
            wusl: from[2],
            dmrl: from[3],
            dmrsl: u32_at(from, 4),
            dmsl: u64_at(from, 8),
        }
    }

    /// Encodes the structure.
    pub fn encode(&self, into: &mut [u8; SIZE]) {
        *into = [0; SIZE];
        into[0] = self.vsl;
        into[1] = self.wzsl;
        into[2] = self.wusl;
        into[3] = self.dmrl;
        put32(into, 4, self.dmrsl);
        put64(into, 8, self.dmsl);
    }
}
