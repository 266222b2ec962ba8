//! The module: a bdev on two bases that writes to both and reads from one.
//!
//! It survives the loss of a base. When that returns, it is copied from the other, range by range, while the
//! mirror is in use: until then it gets writes and no reads. A base that fails a write gets no reads any more
//! until it was removed and returns. Which base has all data is known while the mirror exists; it is not
//! stored on the bases, so that a mirror is created when both are there and both are taken to be alike.
#![allow(unreachable_pub, reason = "in a crate of its own the module is public")]

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use bdev::rpc::{BdevModule, delete_method};
use bdev::stacking::{BaseBdev, BaseChannels, BaseSet, FanOut, FanOutResult, LockedRange, UpperOutcome};
use bdev::{
    AsyncChannel, Bdev, BdevError, BdevGeometry, BlockDevice, BoxedChannel, Completion, Durability,
    InfoValue, IoLimits, Registry, Request, Uuid,
};
use block_io::{Channel, Op, Status};
use control::{Method, Module, RpcError};
use reactor::{Core, ReactorHandle};

/// Mirrors as a [`Module`].
pub struct MirrorModule {
    bdevs: Arc<BdevModule>,
    /// The core that copies.
    reactor: ReactorHandle,
}

impl MirrorModule {
    /// Creates mirrors among the devices of `bdevs`.
    pub fn new(bdevs: Arc<BdevModule>, reactor: ReactorHandle) -> Arc<MirrorModule> {
        Arc::new(MirrorModule { bdevs, reactor })
    }
}

impl Module for MirrorModule {
    const NAME: &'static str = "bdev_mirror";
    const DEPENDS_ON: &'static [&'static str] = &["bdev"];

    fn methods() -> Vec<Method<MirrorModule>> {
        vec![
            Method::update("bdev_mirror_create", create_method)
                .text(
                    "Creates a bdev that writes to two bases and reads from one, when both are there.",
                    "name of the bdev",
                )
                .assigns(&["uuid"])
                .canonical(|module: &MirrorModule, params: &mut CreateMirror| {
                    let registry = module.bdevs.registry();
                    params.base_bdevs.iter_mut().for_each(|base| *base = registry.name_of(base));
                    Ok(())
                })
                .errors(&[
                    (RpcError::EEXIST, "the name or UUID is in use"),
                    (RpcError::EBUSY, "a base bdev is claimed"),
                    (RpcError::EINVAL, "there are not two bases, or they have different blocks, or metadata"),
                ]),
            delete_method("bdev_mirror_delete", PRODUCT_NAME, |module: &MirrorModule| &module.bdevs),
        ]
    }
}

control::parameters! {
    struct CreateMirror {
        /// Name
        name: String,
        /// The two devices below
        base_bdevs: Vec<String>,
        /// UUID; without, a random one
        uuid: Option<Uuid>,
    }
}

fn create_method(module: &MirrorModule, params: CreateMirror) -> Result<String, RpcError> {
    let name = params.name.clone();
    let bases: Vec<String> = params.base_bdevs.clone();
    let bases: Vec<&str> = bases.iter().map(String::as_str).collect();
    let reactor = module.reactor.clone();
    let create = move |registry: &Registry, params: &mut CreateMirror| {
        let device = create(registry, &params.name, &params.base_bdevs, params.uuid, &reactor)?;
        params.uuid = Some(device.uuid());
        Ok(())
    };
    module.bdevs.create_on_bases(&bases, &name, "bdev_mirror_create", params, create)?;
    Ok(name)
}

const PRODUCT_NAME: &str = "mirror";
const BASES: usize = 2;
/// Copied at a time; writes of the range wait meanwhile.
const COPY_BYTES: usize = 128 << 10;
/// Interval of the checks for a range lock or a buffer, which no event announces.
const RECHECK_NS: u64 = 20_000;
/// What a mirror passes on if both bases support it.
const OPS: [Op; 5] = [Op::Read, Op::Write, Op::Flush, Op::Unmap, Op::WriteZeroes];

/// The module's object of a mirror.
struct MirrorBdev {
    name: String,
    base_names: Vec<String>,
    bases: Arc<BaseSet>,
    sync: Arc<SyncState>,
    /// It shrinks with a base.
    blocks: AtomicU64,
    geometry: BdevGeometry,
    durability: Durability,
    depth: u32,
    ops: Vec<Op>,
    reactor: ReactorHandle,
}

fn create(
    registry: &Registry,
    name: &str,
    base_names: &[String],
    uuid: Option<Uuid>,
    reactor: &ReactorHandle,
) -> Result<Arc<BlockDevice>, BdevError> {
    let invalid = |reason: String| Err(BdevError::Invalid { field: "base_bdevs", reason });
    if base_names.len() != BASES {
        return invalid(format!("a mirror has {BASES} bases, not {}", base_names.len()));
    }
    let set = BaseSet::new(BASES);
    let mut devices = Vec::new();
    for (place, base) in base_names.iter().enumerate() {
        let base = BaseBdev::claim(registry, base, &format!("mirror bdev {name}"))?;
        devices.push(base.device().clone());
        if set.insert(place, base).is_err() {
            unreachable!("the set is new");
        }
    }
    let (one, other) = (devices[0].geometry(), devices[1].geometry());
    if one.block_size != other.block_size || one.metadata.bytes + other.metadata.bytes > 0 {
        return invalid(format!("{} are not of one block size, or have metadata", base_names.join(" and ")));
    }
    let blocks = one.blocks.min(other.blocks);
    let module = MirrorBdev {
        name: name.to_string(),
        base_names: base_names.to_vec(),
        bases: set,
        sync: Arc::new(SyncState::new()),
        blocks: AtomicU64::new(blocks),
        geometry: BdevGeometry {
            write_cache: one.write_cache || other.write_cache,
            ..BdevGeometry::new(one.block_size, blocks)
        },
        durability: devices[0].durability().min(devices[1].durability()),
        depth: devices[0].bdev().depth().min(devices[1].bdev().depth()),
        ops: OPS.into_iter().filter(|op| devices.iter().all(|base| base.bdev().supports(*op))).collect(),
        reactor: reactor.clone(),
    };
    let device = registry.register(name, uuid, &[], Arc::new(module))?;
    devices.iter().for_each(|base| registry.stack(base, &device));
    Ok(device)
}

impl Bdev for MirrorBdev {
    fn product_name(&self) -> &'static str {
        PRODUCT_NAME
    }

    fn geometry(&self) -> BdevGeometry {
        BdevGeometry { blocks: self.blocks.load(Ordering::Relaxed), ..self.geometry }
    }

    fn durability(&self) -> Durability {
        self.durability
    }

    fn supports(&self, op: Op) -> bool {
        self.ops.contains(&op)
    }

    fn open(&self, core: &Core) -> Result<BoxedChannel, BdevError> {
        Ok(Box::new(MirrorChannel {
            channels: self.bases.open(core)?,
            fan_out: FanOut::new(self.depth, BASES),
            sync: self.sync.clone(),
            completions: Vec::new(),
        }))
    }

    fn io_limits(&self) -> IoLimits {
        // The channels of the bases divide what their modules do not take.
        IoLimits::NONE
    }

    fn depth(&self) -> u32 {
        self.depth
    }

    fn driver_specific(&self) -> Vec<(&'static str, InfoValue)> {
        let named = |places: u8| {
            let names = self.base_names.iter().enumerate().filter(|(place, _)| places >> place & 1 != 0);
            InfoValue::List(names.map(|(_, name)| name.as_str().into()).collect())
        };
        let object = vec![
            ("base_bdevs", named(u8::MAX)),
            ("in_sync", named(self.sync.in_sync())),
            ("copied_to", named(self.sync.copying())),
        ];
        vec![("mirror", InfoValue::Object(object))]
    }

    fn on_base_removed(&self, base: &BlockDevice) -> UpperOutcome {
        let Some(place) = self.bases.place_of(base) else { return UpperOutcome::Stays };
        let survives = self.sync.lose(place);
        self.bases.remove(place);
        if survives { UpperOutcome::Stays } else { UpperOutcome::Removed }
    }

    fn on_base_resized(&self, base: &BlockDevice) -> UpperOutcome {
        self.blocks.fetch_min(base.geometry().blocks, Ordering::Relaxed);
        UpperOutcome::Resized
    }

    fn on_base_returned(&self, registry: &Registry, base: &Arc<BlockDevice>) -> Result<(), BdevError> {
        let is_named = |name: &String| registry.find(name).is_some_and(|found| Arc::ptr_eq(&found, base));
        let Some(place) = self.base_names.iter().position(is_named) else { return Ok(()) };
        if let Some(present) = self.bases.base(place) {
            if !present.device().is_removed() {
                return Ok(());
            }
            // It returned before its removal was reported here.
            if self.on_base_removed(present.device()) == UpperOutcome::Removed {
                return registry.unregister(&self.name).map(drop);
            }
        }
        let geometry = base.geometry();
        if geometry.block_size != self.geometry.block_size || geometry.blocks < self.geometry().blocks {
            let reason = format!("{} is smaller than the mirror, or has other blocks", base.name());
            return Err(BdevError::Invalid { field: "base_bdevs", reason });
        }
        let Some(upper) = registry.find(&self.name) else { return Ok(()) };
        let opened = BaseBdev::claim(registry, base.name(), &format!("mirror bdev {}", self.name))?;
        let sources = self.sync.in_sync();
        let source =
            (0..BASES).find(|place| sources >> place & 1 != 0).and_then(|place| self.bases.base(place));
        let (Some(source), Ok(target)) = (source, self.bases.insert(place, opened)) else { return Ok(()) };
        let round = self.sync.start_copy(place);
        registry.stack(base, &upper);
        let copy = BaseCopy { upper, source, target, sync: self.sync.clone(), place, round };
        let start = move |core: &Core| {
            let core = core.clone();
            core.clone().spawn(async move { copy.run(&core).await });
        };
        if self.reactor.post(start).is_err() {
            self.sync.end_copy(place, round, false);
        }
        Ok(())
    }

    fn on_removed(&self) {
        self.sync.cancel_copies();
    }

    fn on_closed(&self) {
        self.bases.release();
    }
}

/// Which bases have all data. Changed with the lock; channels read `in_sync` for each read.
struct SyncState {
    in_sync: AtomicU8,
    copies: Mutex<CopyState>,
}

#[derive(Default)]
struct CopyState {
    /// Bits of the bases that are being copied to.
    copying: u8,
    /// The number of the last copy: an older one that still runs changes nothing.
    round: u64,
}

impl SyncState {
    fn new() -> SyncState {
        SyncState { in_sync: AtomicU8::new((1 << BASES) - 1), copies: Mutex::default() }
    }

    fn in_sync(&self) -> u8 {
        self.in_sync.load(Ordering::Acquire)
    }

    fn copying(&self) -> u8 {
        self.lock().copying
    }

    /// A base has failed or gone. `false` if it is the last with all data, which stays so.
    fn lose(&self, place: usize) -> bool {
        let mut copies = self.lock();
        copies.copying &= !(1 << place);
        let rest = self.in_sync() & !(1 << place);
        if rest != 0 {
            self.in_sync.store(rest, Ordering::Release);
        }
        rest != 0
    }

    fn start_copy(&self, place: usize) -> u64 {
        let mut copies = self.lock();
        copies.copying |= 1 << place;
        copies.round += 1;
        copies.round
    }

    fn runs(&self, place: usize, round: u64) -> bool {
        let copies = self.lock();
        copies.round == round && copies.copying >> place & 1 != 0
    }

    fn end_copy(&self, place: usize, round: u64, is_whole: bool) {
        let mut copies = self.lock();
        if copies.round != round || copies.copying >> place & 1 == 0 {
            return;
        }
        copies.copying &= !(1 << place);
        if is_whole {
            self.in_sync.fetch_or(1 << place, Ordering::Release);
        }
    }

    fn cancel_copies(&self) {
        self.lock().copying = 0;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, CopyState> {
        // Each change is whole before anything can panic.
        self.copies.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// The copy of one base to another that has returned.
///
/// A write that a channel submits before it knows of the returned base is in flight when its range is locked,
/// or the range was not copied yet: so it is on the source before the copy reads it. Every later write goes
/// to both.
struct BaseCopy {
    upper: Arc<BlockDevice>,
    source: Arc<BaseBdev>,
    target: Arc<BaseBdev>,
    sync: Arc<SyncState>,
    place: usize,
    round: u64,
}

impl BaseCopy {
    async fn run(self, core: &Core) {
        let is_whole = self.copy_all(core).await.is_some();
        if !is_whole {
            log::warn!(target: "bdev", "{} is not mirrored: its copy has ended early", self.upper.name());
        }
        self.sync.end_copy(self.place, self.round, is_whole);
    }

    /// `None` if it cannot be finished.
    async fn copy_all(&self, core: &Core) -> Option<()> {
        let source = AsyncChannel::new(core, self.source.channel(core).ok()?);
        let target = AsyncChannel::new(core, self.target.channel(core).ok()?);
        let block_size = self.upper.geometry().block_size as usize;
        let step = (COPY_BYTES / block_size).max(1) as u64;
        let mut lba = 0;
        loop {
            // It may shrink.
            let blocks = self.upper.geometry().blocks.saturating_sub(lba).min(step);
            if blocks == 0 {
                break;
            }
            let _locked = self.lock(core, lba..lba + blocks).await?;
            let buffer = loop {
                match core.pool().take(blocks as usize * block_size) {
                    Some(buffer) => break buffer,
                    None => core.sleep_ns(RECHECK_NS).await,
                }
            };
            let buffer = source.read(lba, buffer).await.ok()?;
            target.write(lba, buffer).await.ok()?;
            lba += blocks;
        }
        if self.target.device().supports(Op::Flush) {
            target.flush().await.ok()?;
        }
        Some(())
    }

    async fn lock(&self, core: &Core, range: std::ops::Range<u64>) -> Option<LockedRange> {
        let mut locked = None;
        while bdev::supports_fused() && self.sync.runs(self.place, self.round) {
            if locked.is_none() {
                locked = self.upper.lock_range(range.clone());
            }
            if locked.as_ref().is_some_and(LockedRange::is_granted) {
                return locked;
            }
            core.sleep_ns(RECHECK_NS).await;
        }
        None
    }
}

struct MirrorChannel {
    channels: BaseChannels,
    fan_out: FanOut,
    sync: Arc<SyncState>,
    /// Empty between calls.
    completions: Vec<Completion>,
}

impl MirrorChannel {
    /// Ends a request, or sends it elsewhere.
    fn finish(&mut self, result: FanOutResult, sink: &mut Vec<Completion>) {
        if result.status.is_success() {
            return sink.push(result.complete());
        }
        if result.request.op == Op::Read {
            let others = u64::from(self.sync.in_sync()) & !result.failed;
            return match others & others.wrapping_neg() {
                0 => sink.push(result.complete()),
                other => self.fan_out.retry(result, other, &mut self.channels),
            };
        }
        for place in (0..BASES).filter(|place| result.failed >> place & 1 != 0) {
            // Before the completion: from then on no core reads what the base does not have.
            self.sync.lose(place);
        }
        let is_stored = result.succeeded & u64::from(self.sync.in_sync()) != 0;
        let status = if is_stored { Status::SUCCESS } else { result.status };
        sink.push(result.complete_with(status));
    }
}

impl Channel for MirrorChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        self.channels.sync();
        let in_sync = u64::from(self.sync.in_sync());
        let writes = self.channels.present() | in_sync;
        // The first base with all data.
        let reads = in_sync & in_sync.wrapping_neg();
        for request in batch.drain(..) {
            let places = if request.op == Op::Read { reads } else { writes };
            self.fan_out.copy_to(request, places, &mut self.channels);
        }
        self.channels.submit();
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        let mut completions = std::mem::take(&mut self.completions);
        self.channels.poll(&mut completions);
        for completion in completions.drain(..) {
            if let Some(result) = self.fan_out.complete(completion, &mut self.channels) {
                self.finish(result, sink);
            }
        }
        self.completions = completions;
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        self.channels.deadline()
    }
}
