//! Feature bits.

bitflags::bitflags! {
    /// Features that driver and device negotiate: those of virtqueues and of vhost, and below bit 24 those of the kind
    /// of device, where one bit has one meaning for each.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Features: u64 {
        /// SCSI: a command may have data in both directions.
        const SCSI_INOUT = 1 << 0;
        /// SCSI: logical units that appear or go are reported.
        const SCSI_HOTPLUG = 1 << 1;
        /// SCSI: changed parameters of logical units are reported.
        const SCSI_CHANGE = 1 << 2;
        /// Block: the configuration has the largest length of a segment.
        const BLK_SIZE_MAX = 1 << 1;
        /// Block: the configuration has the largest number of segments of a request.
        const BLK_SEG_MAX = 1 << 2;
        /// Block: the configuration has a disk geometry.
        const BLK_GEOMETRY = 1 << 4;
        /// Block: the device is read-only.
        const BLK_RO = 1 << 5;
        /// Block: the configuration has the block size.
        const BLK_BLK_SIZE = 1 << 6;
        /// Block: the device has a cache that can be flushed.
        const BLK_FLUSH = 1 << 9;
        /// Block: the configuration has the optimal alignment of I/O.
        const BLK_TOPOLOGY = 1 << 10;
        /// Block: the driver can switch the cache between write-back and write-through.
        const BLK_CONFIG_WCE = 1 << 11;
        /// Block: the device has several queues.
        const BLK_MQ = 1 << 12;
        /// Block: discard.
        const BLK_DISCARD = 1 << 13;
        /// Block: write zeroes.
        const BLK_WRITE_ZEROES = 1 << 14;
        /// vhost: the device logs the pages that it writes.
        const VHOST_LOG_ALL = 1 << 26;
        /// A descriptor may refer to a table of descriptors.
        const INDIRECT_DESC = 1 << 28;
        /// Notifications by index.
        const EVENT_IDX = 1 << 29;
        /// vhost-user: the back-end has protocol features.
        const VHOST_USER_PROTOCOL_FEATURES = 1 << 30;
        /// Virtio 1.0 or later.
        const VERSION_1 = 1 << 32;
        /// Packed virtqueues.
        const RING_PACKED = 1 << 34;
    }
}
