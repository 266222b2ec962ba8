//! The device.

use std::sync::Arc;
use std::time::Duration;

use bdev::stacking::{BaseBdev, BaseChannel, UpperOutcome};
use bdev::{
    Bdev, BdevError, BdevGeometry, BlockDevice, BoxedChannel, Durability, InfoValue, IoLimits, Registry, Uuid,
};
use block_io::Op;
use reactor::ReactorHandle;
use wire_blob::ChecksumsId;

use crate::channel::ChecksumChannel;
use crate::layout::ChecksumLayout;
use crate::owner;
use crate::shared::{ChecksumShared, DescribeOffset, OwnerMessage};
use crate::table::TableStart;

/// Namespace of the UUIDs, which are made of the base's.
const UUID_NAMESPACE: Uuid = Uuid::from_u128(0x1f6f_5f0c_5d5e_4d55_9d0d_2a6b_53b5_8f1e);

/// The data of a device with checksums, as a device of its own.
pub struct ChecksumBdev {
    base: Arc<BaseBdev>,
    shared: Arc<ChecksumShared>,
    geometry: BdevGeometry,
}

/// The name of the device that verifies the data of this one.
pub fn checksums_name(base: &BlockDevice) -> String {
    format!("{}_checksums", base.name())
}

/// Registers the data of a device as `NAME_checksums`, and starts its owner. `id` is that of the checksums
/// which are there, if any. Nothing is written before [`ChecksumBdev::begin`].
///
/// # Errors
/// [`BdevError::Exists`] if the name is in use; [`BdevError::Removed`] if the base or the core has gone.
pub fn register(
    registry: &Registry,
    reactor: &ReactorHandle,
    base: Arc<BaseBdev>,
    layout: ChecksumLayout,
    id: ChecksumsId,
) -> Result<Arc<BlockDevice>, BdevError> {
    let below = base.device().clone();
    let name = checksums_name(&below);
    let shared = ChecksumShared::new(layout, below.name(), id);
    let geometry = below.geometry();
    let geometry = BdevGeometry { blocks: layout.data_bytes / u64::from(geometry.block_size), ..geometry };
    let uuid = Uuid::new_v5(&UUID_NAMESPACE, below.uuid().as_bytes());
    let started = owner::start(reactor, &shared, &base);
    let module = Arc::new(ChecksumBdev { base: base.clone(), shared: shared.clone(), geometry });
    let registered = started.and_then(|()| registry.register(&name, Some(uuid), &[], module));
    let device = registered.inspect_err(|_| {
        shared.close();
        base.release();
    })?;
    registry.stack(&below, &device);
    Ok(device)
}

impl ChecksumBdev {
    /// A name for new checksums.
    pub fn new_id() -> ChecksumsId {
        *Uuid::new_v4().as_bytes()
    }

    /// Which checksums these are.
    pub fn id(&self) -> ChecksumsId {
        self.shared.id()
    }

    /// Where the data is.
    pub fn layout(&self) -> ChecksumLayout {
        self.shared.layout
    }

    /// The device below.
    pub fn base(&self) -> &Arc<BlockDevice> {
        self.base.device()
    }

    /// Begins to verify data, with the checksums that the device has: those of the data, but where a write
    /// was in progress. Once, before data is read or written.
    pub fn begin(&self, describe: DescribeOffset) {
        self.shared.begin(self.shared.id(), TableStart::Believed, describe);
    }

    /// The same with new checksums, called `id`, since those of the device, if any, may be of other data.
    /// They are computed of what is there now in the regions of 1 MiB whose bits are set in `dirty`, lowest
    /// first.
    pub fn begin_anew(&self, id: ChecksumsId, dirty: Vec<u8>, describe: DescribeOffset) {
        self.shared.begin(id, TableStart::Anew(dirty), describe);
    }

    /// Waits until it is durable that the device has checksums. Returns whether it is in time.
    pub fn wait_started(&self, timeout: Duration) -> bool {
        self.shared.wait_started(timeout)
    }

    /// Writes all checksums, and waits until they are durable; for a device that is not written any more.
    /// Returns whether they are in time.
    pub fn settle(&self, timeout: Duration) -> bool {
        if !self.shared.is_active() || self.shared.is_closed() {
            return !self.shared.is_active();
        }
        self.shared.set_settled(false);
        self.shared.send_blocking(OwnerMessage::Settle);
        self.shared.wait_settled(timeout)
    }

    /// Blocks that were read and not as they were written.
    pub fn mismatches(&self) -> u64 {
        self.shared.mismatches()
    }

    /// Regions of 1 MiB whose checksums are not on the device, as of the last second.
    pub fn dirty_regions(&self) -> u32 {
        self.shared.dirty_regions()
    }

    /// Waits until the device below is closed, after the removal of this one.
    pub fn wait_closed(&self, timeout: Duration) -> bool {
        self.shared.wait_released(timeout)
    }
}

impl Bdev for ChecksumBdev {
    fn product_name(&self) -> &'static str {
        "Data Checksums"
    }

    fn geometry(&self) -> BdevGeometry {
        self.geometry
    }

    fn durability(&self) -> Durability {
        self.base.device().durability()
    }

    fn supports(&self, op: Op) -> bool {
        // Without a reset of its own, the layer waits for what is in flight.
        op != Op::Reset && self.base.device().bdev().supports(op)
    }

    fn io_limits(&self) -> IoLimits {
        // The base's channel divides what its module does not take.
        IoLimits::NONE
    }

    fn open(&self, core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        let base = BaseChannel::new(self.base.channel(core)?);
        let (block_bytes, depth) = (self.geometry.block_size, self.depth());
        Ok(Box::new(ChecksumChannel::new(&self.shared, base, core, block_bytes, depth)))
    }

    fn driver_specific(&self) -> Vec<(&'static str, InfoValue)> {
        let object = vec![
            ("base_bdev_name", self.base.device().name().into()),
            ("mismatches", InfoValue::Number(self.mismatches())),
            ("dirty_regions", InfoValue::Number(self.dirty_regions().into())),
        ];
        vec![("checksums", InfoValue::Object(object))]
    }

    fn reads_undefined(&self) -> bool {
        self.base.device().bdev().reads_undefined()
    }

    fn read_only(&self) -> bool {
        self.base.device().bdev().read_only()
    }

    fn depth(&self) -> u32 {
        self.base.device().bdev().depth()
    }

    fn abort_in_flight(&self) {
        self.base.device().bdev().abort_in_flight();
    }

    fn on_base_resized(&self, _base: &BlockDevice) -> UpperOutcome {
        // The checksums are at the end that the device had.
        UpperOutcome::Stays
    }

    fn on_closed(&self) {
        self.shared.close();
        self.base.release();
    }
}
