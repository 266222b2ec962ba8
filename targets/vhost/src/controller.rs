//! Controllers, and the configuration that the cores see.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use bdev::BlockDevice;
use block_io::Op;
use target_shell::{DeviceMap, TargetConfig};
use wire_virtio::Features;
use wire_virtio::blk::{BlkConfig, ID_BYTES, SECTOR_BYTES};

use crate::limits::{QUEUES_MAX, RANGE_SECTORS_MAX, SEGMENT_BYTES_MAX, SEGMENTS_MAX};

/// A virtio block device behind a socket, as its clients see it.
#[derive(Clone, Debug)]
pub(crate) struct Controller {
    /// Identifies it as long as the target lives; a resize keeps it.
    pub(crate) id: u64,
    /// The device's key in the [`DeviceMap`].
    pub(crate) key: u32,
    /// Its listener.
    pub(crate) portid: u16,
    pub(crate) name: String,
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
    /// Closed connections with requests in flight.
    pub(crate) closing: Arc<AtomicU32>,
}

/// What a controller is called and how it is offered.
#[derive(Clone, Debug)]
pub(crate) struct ControllerOptions {
    pub(crate) name: String,
    pub(crate) read_only: bool,
    pub(crate) packed_ring: bool,
}

impl Controller {
    pub(crate) fn new(
        id: u64,
        key: u32,
        portid: u16,
        options: ControllerOptions,
        device: &BlockDevice,
    ) -> Controller {
        let geometry = device.geometry();
        let supports = |op| device.bdev().supports(op);
        let read_only = options.read_only || device.bdev().read_only();
        let physical_blocks = (geometry.physical_block_size / geometry.block_size).max(1);
        let mut serial = [0; ID_BYTES];
        serial.iter_mut().zip(device.name().bytes()).for_each(|(to, from)| *to = from);
        Controller {
            id,
            key,
            portid,
            name: options.name,
            read_only,
            packed_ring: options.packed_ring,
            block_size: geometry.block_size,
            physical_exponent: physical_blocks.ilog2() as u8,
            optimal_io_blocks: geometry.optimal_io_boundary_blocks,
            sectors: geometry.bytes() / SECTOR_BYTES,
            can_flush: supports(Op::Flush),
            can_unmap: !read_only && supports(Op::Unmap),
            can_write_zeroes: !read_only && supports(Op::WriteZeroes),
            write_cache: geometry.write_cache,
            serial,
            closing: Arc::default(),
        }
    }

    /// The features that it offers, those of the protocol included.
    pub(crate) fn features(&self) -> Features {
        let mut features = Features::BLK_SIZE_MAX
            | Features::BLK_SEG_MAX
            | Features::BLK_BLK_SIZE
            | Features::BLK_TOPOLOGY
            | Features::BLK_MQ
            | Features::INDIRECT_DESC
            | Features::EVENT_IDX
            | Features::VHOST_LOG_ALL
            | Features::VHOST_USER_PROTOCOL_FEATURES
            | Features::VERSION_1;
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

    /// Its configuration space.
    pub(crate) fn config_space(&self, writeback: bool) -> [u8; BlkConfig::SIZE] {
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

/// The configuration of the target, published to all cores.
#[derive(Default)]
pub(crate) struct VhostConfig {
    pub(crate) controllers: Vec<Arc<Controller>>,
    pub(crate) devices: DeviceMap,
}

impl VhostConfig {
    pub(crate) fn of_port(&self, portid: u16) -> Option<&Arc<Controller>> {
        self.controllers.iter().find(|controller| controller.portid == portid)
    }

    pub(crate) fn by_id(&self, id: u64) -> Option<&Arc<Controller>> {
        self.controllers.iter().find(|controller| controller.id == id)
    }
}

impl TargetConfig for VhostConfig {
    fn devices(&self) -> &DeviceMap {
        &self.devices
    }
}
