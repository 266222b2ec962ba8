//! Exports, and the configuration that the cores see.

use std::sync::Arc;

use bdev::{BdevGeometry, BlockDevice};
use block_io::Op;
use target_shell::{DeviceMap, TargetConfig};
use tls::ServerCredentials;
use wire_nbd::{ExportReply, Info, TransmissionFlags};

use crate::limits::{MINIMUM_BYTES_MAX, PAYLOAD_MAX, WRITE_PIECE_BYTES};

/// A block device under a name, as clients of one listener see it.
#[derive(Clone, Debug)]
pub(crate) struct Export {
    /// Identifies it as long as the target lives; a resize keeps it.
    pub(crate) id: u64,
    /// The device's key in the [`DeviceMap`].
    pub(crate) key: u32,
    pub(crate) portid: u16,
    pub(crate) name: String,
    pub(crate) description: String,
    pub(crate) read_only: bool,
    /// Only clients with TLS have it.
    pub(crate) requires_tls: bool,
    pub(crate) block_size: u32,
    /// Writes are whole multiples of this many bytes, at multiples of them: more than a block for a raid5f
    /// array.
    pub(crate) write_unit_bytes: u64,
    /// Multiple that is efficient, in bytes.
    pub(crate) preferred_bytes: u32,
    /// Size in bytes.
    pub(crate) size: u64,
    pub(crate) can_unmap: bool,
    pub(crate) can_write_zeroes: bool,
    pub(crate) can_flush: bool,
    /// The device itself answers what is allocated.
    pub(crate) can_seek: bool,
    /// Reads leave memory as it is: it has to be zeroed first.
    pub(crate) reads_undefined: bool,
    /// Writes of parts of blocks are possible.
    pub(crate) writes_parts: bool,
}

/// What an export is called and who may do what.
#[derive(Clone, Debug)]
pub(crate) struct ExportNames {
    pub(crate) name: String,
    pub(crate) description: String,
    pub(crate) read_only: bool,
    pub(crate) requires_tls: bool,
}

impl Export {
    pub(crate) fn new(id: u64, key: u32, portid: u16, names: ExportNames, device: &BlockDevice) -> Export {
        let geometry = device.geometry();
        let supports = |op| device.bdev().supports(op);
        let ExportNames { name, description, read_only, requires_tls } = names;
        let write_unit_bytes = write_unit_bytes(&geometry);
        let efficient = u64::from(geometry.physical_block_size.max(4096).next_power_of_two());
        // A power of two, by the protocol.
        let preferred_bytes = efficient.max(power_of_two_in(write_unit_bytes));
        Export {
            id,
            key,
            portid,
            name,
            description,
            read_only: read_only || device.bdev().read_only(),
            requires_tls,
            block_size: geometry.block_size,
            write_unit_bytes,
            preferred_bytes: u32::try_from(preferred_bytes).unwrap_or(1 << 31),
            size: geometry.bytes(),
            can_unmap: supports(Op::Unmap),
            can_write_zeroes: supports(Op::WriteZeroes),
            can_flush: supports(Op::Flush),
            can_seek: supports(Op::SeekData) && supports(Op::SeekHole),
            reads_undefined: device.bdev().reads_undefined(),
            writes_parts: bdev::supports_fused(),
        }
    }

    /// Whether single blocks cannot be written.
    fn has_large_units(&self) -> bool {
        self.write_unit_bytes > u64::from(self.block_size)
    }

    /// Whether a range can be written.
    pub(crate) fn can_write(&self, offset: u64, length: u64) -> bool {
        let is_whole =
            offset.is_multiple_of(self.write_unit_bytes) && length.is_multiple_of(self.write_unit_bytes);
        is_whole || (self.writes_parts && !self.has_large_units())
    }

    /// Most bytes of a piece of a write, which ends at a multiple of a unit.
    pub(crate) fn write_piece_bytes(&self) -> u64 {
        WRITE_PIECE_BYTES.max(self.write_unit_bytes)
    }

    /// What it offers; DF only with structured replies.
    pub(crate) fn flags(&self, structured: bool) -> TransmissionFlags {
        let mut flags = TransmissionFlags::HAS_FLAGS
            | TransmissionFlags::SEND_FLUSH
            | TransmissionFlags::SEND_FUA
            | TransmissionFlags::SEND_CACHE
            | TransmissionFlags::CAN_MULTI_CONN;
        flags.set(TransmissionFlags::READ_ONLY, self.read_only);
        flags.set(TransmissionFlags::SEND_TRIM, !self.read_only && self.can_unmap);
        let zeroes = TransmissionFlags::SEND_WRITE_ZEROES | TransmissionFlags::SEND_FAST_ZERO;
        flags.set(zeroes, !self.read_only);
        flags.set(TransmissionFlags::SEND_DF, structured);
        flags
    }

    /// Size and flags.
    pub(crate) fn reply(&self, structured: bool) -> ExportReply {
        ExportReply { size: self.size, flags: self.flags(structured) }
    }

    /// Sizes of requests.
    pub(crate) fn block_sizes(&self) -> Info<'static> {
        let minimum = if self.read_only {
            1
        } else if self.has_large_units() {
            // The most of a unit that can be said.
            power_of_two_in(self.write_unit_bytes).min(MINIMUM_BYTES_MAX.into()) as u32
        } else if self.writes_parts {
            1
        } else {
            self.block_size
        };
        Info::BlockSize { minimum, preferred: self.preferred_bytes, payload_max: PAYLOAD_MAX as u32 }
    }
}

/// The bytes of a device's unit of writes.
pub(crate) fn write_unit_bytes(geometry: &BdevGeometry) -> u64 {
    u64::from(geometry.write_unit_blocks.max(1)) * u64::from(geometry.block_size)
}

/// The largest power of two that divides a number of bytes, which is not 0.
fn power_of_two_in(bytes: u64) -> u64 {
    1 << bytes.trailing_zeros()
}

/// The configuration of the target, published to all cores.
#[derive(Default)]
pub(crate) struct NbdConfig {
    pub(crate) exports: Vec<Arc<Export>>,
    pub(crate) devices: DeviceMap,
    /// With what clients may begin TLS.
    pub(crate) tls: Option<ServerCredentials>,
}

impl NbdConfig {
    /// The exports of a listener.
    pub(crate) fn of_port(&self, portid: u16) -> impl Iterator<Item = &Arc<Export>> {
        self.exports.iter().filter(move |export| export.portid == portid)
    }

    /// An export of a listener by its name. The empty name is the default export: the only one.
    pub(crate) fn find(&self, portid: u16, name: &str) -> Option<&Arc<Export>> {
        let named = self.of_port(portid).find(|export| export.name == name);
        if named.is_some() || !name.is_empty() {
            return named;
        }
        let mut exports = self.of_port(portid);
        exports.next().filter(|_| exports.next().is_none())
    }
}

impl TargetConfig for NbdConfig {
    fn devices(&self) -> &DeviceMap {
        &self.devices
    }
}
