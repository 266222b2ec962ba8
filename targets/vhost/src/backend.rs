//! What a controller is: a virtio block device or a virtio SCSI host.

use std::sync::Arc;

use bdev::BlockDevice;
use block_io::Op;
use scsi::LogicalUnit;
use wire_virtio::Features;
use wire_virtio::blk::{BlkConfig, ID_BYTES, SECTOR_BYTES};
use wire_virtio::scsi::{self as virtio_scsi, ScsiConfig, ScsiEvent};

use crate::limits::{
    QUEUES_MAX, RANGE_SECTORS_MAX, SCSI_COMMANDS_PER_LUN, SCSI_TARGETS, SEGMENT_BYTES_MAX, SEGMENTS_MAX,
};

/// What a controller is.
#[derive(Clone, Debug)]
pub(crate) enum Backend {
    Blk(BlkBackend),
    Scsi(Box<ScsiBackend>),
}

/// A virtio block device.
#[derive(Clone, Debug)]
pub(crate) struct BlkBackend {
    /// The device's key in the [`DeviceMap`](target_shell::DeviceMap).
    pub(crate) key: u32,
    pub(crate) read_only: bool,
    pub(crate) packed_ring: bool,
    pub(crate) block_size: u32,
    /// Logical blocks of a physical block, as an exponent of 2.
    pub(crate) physical_exponent: u8,
    pub(crate) optimal_io_blocks: u32,
    /// Size in sectors.
    pub(crate) sectors: u64,
    pub(crate) can_flush: bool,
    pub(crate) can_unmap: bool,
    pub(crate) can_write_zeroes: bool,
    /// Completed writes may be lost at a power failure.
    pub(crate) write_cache: bool,
    /// What the guest shows as the disk's serial number: the device's name.
    pub(crate) serial: [u8; ID_BYTES],
}

/// A virtio SCSI host, whose targets have one logical unit each, LUN 0.
#[derive(Clone, Debug, Default)]
pub(crate) struct ScsiBackend {
    pub(crate) targets: [Option<ScsiUnit>; SCSI_TARGETS],
}

/// The logical unit of a target.
#[derive(Clone, Debug)]
pub(crate) struct ScsiUnit {
    /// Identifies it as long as the vhost target lives; a resize keeps it.
    pub(crate) id: u64,
    /// The device's key in the [`DeviceMap`](target_shell::DeviceMap).
    pub(crate) key: u32,
    /// Size at the time of this configuration.
    pub(crate) blocks: u64,
    /// All cores have it, and drivers learn of it: they may send it commands over any virtqueue.
    pub(crate) is_announced: bool,
    pub(crate) unit: Arc<LogicalUnit>,
}

impl Backend {
    /// The features that it offers, those of the protocol included.
    pub(crate) fn features(&self) -> Features {
        let transport = Features::INDIRECT_DESC
            | Features::EVENT_IDX
            | Features::VHOST_LOG_ALL
            | Features::VHOST_USER_PROTOCOL_FEATURES
            | Features::VERSION_1;
        transport
            | match self {
                Backend::Blk(blk) => blk.features(),
                Backend::Scsi(_) => Features::SCSI_HOTPLUG | Features::SCSI_CHANGE | Features::RING_PACKED,
            }
    }

    /// The first virtqueue that may be on another core than the connection. The control queue and the event queue of a SCSI
    /// host are with the connection, and its first request queue too.
    pub(crate) fn first_spread_queue(&self) -> usize {
        match self {
            Backend::Blk(_) => 0,
            Backend::Scsi(_) => virtio_scsi::REQUEST_QUEUE,
        }
    }

    /// Its configuration space.
    pub(crate) fn config_space(&self, writeback: bool) -> Vec<u8> {
        match self {
            Backend::Blk(blk) => blk.config_space(writeback).to_vec(),
            Backend::Scsi(_) => scsi_config().to_bytes().to_vec(),
        }
    }
}

impl BlkBackend {
    pub(crate) fn new(key: u32, read_only: bool, packed_ring: bool, device: &BlockDevice) -> BlkBackend {
        let geometry = device.geometry();
        let supports = |op| device.bdev().supports(op);
        let read_only = read_only || device.bdev().read_only();
        let physical_blocks = (geometry.physical_block_size / geometry.block_size).max(1);
        let mut serial = [0; ID_BYTES];
        serial.iter_mut().zip(device.name().bytes()).for_each(|(to, from)| *to = from);
        BlkBackend {
            key,
            read_only,
            packed_ring,
            block_size: geometry.block_size,
            physical_exponent: physical_blocks.ilog2() as u8,
            optimal_io_blocks: geometry.optimal_io_boundary_blocks,
            sectors: geometry.bytes() / SECTOR_BYTES,
            can_flush: supports(Op::Flush),
            can_unmap: !read_only && supports(Op::Unmap),
            can_write_zeroes: !read_only && supports(Op::WriteZeroes),
            write_cache: geometry.write_cache,
            serial,
        }
    }

    fn features(&self) -> Features {
        let mut features = Features::BLK_SIZE_MAX
            | Features::BLK_SEG_MAX
            | Features::BLK_BLK_SIZE
            | Features::BLK_TOPOLOGY
            | Features::BLK_MQ;
        features.set(Features::BLK_RO, self.read_only);
        features.set(Features::BLK_FLUSH | Features::BLK_CONFIG_WCE, self.can_flush);
        features.set(Features::BLK_DISCARD, self.can_unmap);
        features.set(Features::BLK_WRITE_ZEROES, self.can_write_zeroes);
        features.set(Features::RING_PACKED, self.packed_ring);
        features
    }

    /// Sectors of a block.
    #[inline]
    pub(crate) fn sectors_per_block(&self) -> u32 {
        self.block_size / SECTOR_BYTES as u32
    }

    fn config_space(&self, writeback: bool) -> [u8; BlkConfig::SIZE] {
        let range_sectors = RANGE_SECTORS_MAX;
        BlkConfig {
            capacity: self.sectors,
            size_max: SEGMENT_BYTES_MAX,
            seg_max: SEGMENTS_MAX,
            block_size: self.block_size,
            physical_block_exponent: self.physical_exponent,
            min_io_blocks: 1 << self.physical_exponent.min(15),
            optimal_io_blocks: self.optimal_io_blocks,
            writeback: writeback.into(),
            queues: QUEUES_MAX as u16,
            discard_sectors_max: if self.can_unmap { range_sectors } else { 0 },
            discard_segments_max: self.can_unmap.into(),
            discard_alignment: self.sectors_per_block(),
            write_zeroes_sectors_max: if self.can_write_zeroes { range_sectors } else { 0 },
            write_zeroes_segments_max: self.can_write_zeroes.into(),
            write_zeroes_may_unmap: (self.can_write_zeroes && self.can_unmap).into(),
            ..BlkConfig::default()
        }
        .to_bytes()
    }
}

/// The configuration of a SCSI host. The lengths of CDBs and sense data are fixed.
pub(crate) fn scsi_config() -> ScsiConfig {
    ScsiConfig {
        request_queues: (QUEUES_MAX - virtio_scsi::REQUEST_QUEUE) as u32,
        seg_max: SEGMENTS_MAX,
        max_sectors: scsi::TRANSFER_BYTES_MAX / SECTOR_BYTES as u32,
        commands_per_lun: SCSI_COMMANDS_PER_LUN,
        event_info_size: ScsiEvent::SIZE as u32,
        sense_size: virtio_scsi::SENSE_BYTES as u32,
        cdb_size: virtio_scsi::CDB_BYTES as u32,
        max_channel: 0,
        max_target: SCSI_TARGETS as u16 - 1,
        max_lun: virtio_scsi::UnitAddress::LUN_MAX.into(),
    }
}
