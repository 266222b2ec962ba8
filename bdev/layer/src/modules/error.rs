//! The error device: a virtual device that injects errors, pending I/O and corruption, to test the layers above it.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use block_io::{Op, Payload, RequestFlags, Status, Tag};
use dma::Data;
use random::WyRand;
use slots::{Slab, Slot};
use uuid::Uuid;

use crate::stacking::{BaseBdev, BaseChannel, VirtualBdev, create_on};
use crate::{Bdev as _, BdevError, BlockDevice, BoxedChannel, Completion, InfoValue, Registry, Request};

/// Configuration of an error device.
#[derive(Clone, Debug)]
pub struct ErrorConfig {
    /// Name of the base bdev.
    pub base: String,
    /// Name of the device; `EE_` and the name of the base if none is given.
    pub name: Option<String>,
    /// UUID; random if none is given.
    pub uuid: Option<Uuid>,
    /// Seed of the random numbers of [`Chance::PerMille`].
    pub seed: u64,
}

impl ErrorConfig {
    /// An error device on `base` with the default name, a random UUID and seed 0.
    pub fn new(base: &str) -> ErrorConfig {
        ErrorConfig { base: base.to_string(), name: None, uuid: None, seed: 0 }
    }
}

/// A rule: which I/Os are hit, and by which fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultInjection {
    /// The operation; `None` for any. Resets are never hit.
    pub op: Option<Op>,
    /// Blocks, one of which the I/O must contain; `None` for any.
    pub range: Option<Range<u64>>,
    /// The fault.
    pub action: FaultAction,
    /// Which of the matching I/Os are hit.
    pub chance: Chance,
    /// Maximum number of hits; `None` for no limit.
    pub count: Option<u64>,
    /// Minimum number of I/Os in flight on the channel.
    pub queue_depth: u32,
}

/// The fault that an I/O gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultAction {
    /// It completes with this status and never reaches the base.
    Fail(Status),
    /// It stays pending until a reset, which aborts it, or [`resume_pending`], which forwards it to the base.
    Pending,
    /// One byte of its data is changed: of a read in the buffer, of a write on the base.
    Corrupt {
        /// Offset of the byte in the I/O's data. Shorter I/Os are not hit.
        offset: usize,
        /// Value that the byte is XORed with.
        xor: u8,
    },
}

/// Which of the matching I/Os are hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chance {
    /// Every one.
    Always,
    /// Every nth, counted over all cores; 0 is every one.
    OneIn(u32),
    /// Each with this probability, in thousandths.
    PerMille(u16),
}

impl FaultInjection {
    /// A fault that hits the next I/O of `op` once.
    pub fn once(op: Option<Op>, action: FaultAction) -> FaultInjection {
        FaultInjection { op, range: None, action, chance: Chance::Always, count: Some(1), queue_depth: 0 }
    }
}

/// The module's object of an error device.
pub struct ErrorBdev {
    name: String,
    base: BaseBdev,
    faults: Arc<SharedRules>,
}

/// The rules of one device, shared by its channels. The lock is taken per I/O only while there are rules.
struct SharedRules {
    any: AtomicBool,
    /// Number of [`resume_pending`]s; changed with the lock of the rules.
    resumes: AtomicU64,
    rules: Mutex<FaultRules>,
}

struct FaultRules {
    /// Each with the number of I/Os that matched it.
    list: Vec<(FaultInjection, u64)>,
    rng: WyRand,
}

/// Maximum number of rules of one device; each is checked for every I/O.
const INJECTIONS_MAX: usize = 64;
/// Interval at which a core with pending I/Os checks for a [`resume_pending`].
const RESUME_CHECK_NS: u64 = 10_000_000;

/// Creates an error device on a base, which it claims. It has no rules at first.
pub fn create(registry: &Registry, config: ErrorConfig) -> Result<Arc<BlockDevice>, BdevError> {
    let name = config.name.unwrap_or_else(|| format!("EE_{}", config.base));
    let rules = FaultRules { list: Vec::new(), rng: WyRand::new(config.seed) };
    let faults = Arc::new(SharedRules {
        any: AtomicBool::new(false),
        resumes: AtomicU64::new(0),
        rules: Mutex::new(rules),
    });
    create_on(registry, "error", &config.base, &name, |base| {
        let uuid = config.uuid.unwrap_or_else(|| Uuid::new_v5(&base.device().uuid(), name.as_bytes()));
        (uuid, ErrorBdev { name: name.clone(), base, faults })
    })
}

/// Adds a rule to an error device. The first rule that hits an I/O applies.
pub fn inject(registry: &Registry, name: &str, injection: FaultInjection) -> Result<(), BdevError> {
    with_module(registry, name, |module| {
        let mut rules = module.faults.lock();
        if rules.list.len() >= INJECTIONS_MAX {
            let reason = format!("{name} already has the maximum of {INJECTIONS_MAX} faults");
            return Err(BdevError::invalid("injection", reason));
        }
        rules.list.push((injection, 0));
        module.faults.any.store(true, Ordering::Relaxed);
        Ok(())
    })
}

/// Removes all rules. I/Os that are pending stay so, as in SPDK.
pub fn clear(registry: &Registry, name: &str) -> Result<(), BdevError> {
    with_module(registry, name, |module| {
        let mut rules = module.faults.lock();
        module.faults.remove(&mut rules, |_| true);
        Ok(())
    })
}

/// Removes the rules that keep I/Os pending, and forwards those I/Os to the base.
pub fn resume_pending(registry: &Registry, name: &str) -> Result<(), BdevError> {
    with_module(registry, name, |module| {
        module.faults.resume(|rule| rule.action == FaultAction::Pending);
        Ok(())
    })
}

fn with_module(
    registry: &Registry,
    name: &str,
    act: impl FnOnce(&ErrorBdev) -> Result<(), BdevError>,
) -> Result<(), BdevError> {
    let device = registry.find(name).ok_or_else(|| BdevError::NotFound { name: name.to_string() })?;
    match device.module::<ErrorBdev>() {
        Some(module) => act(module),
        None => Err(BdevError::WrongKind { name: name.to_string(), expected: "Error Injection Disk" }),
    }
}

impl VirtualBdev for ErrorBdev {
    const PRODUCT_NAME: &'static str = "Error Injection Disk";

    fn base(&self) -> &BaseBdev {
        &self.base
    }

    fn open_on(&self, base: BaseChannel, core: &reactor::Core) -> BoxedChannel {
        Box::new(ErrorChannel {
            base,
            clock: core.clock().clone(),
            resumes_applied: self.faults.resumes.load(Ordering::Relaxed),
            faults: self.faults.clone(),
            table: Slab::with_capacity(self.depth() + crate::channel::RESETS_MAX as u32),
            pending: Vec::new(),
            completed: Vec::new(),
        })
    }

    /// [`FaultAction::Corrupt`] changes data.
    fn registered_page_alignment(&self) -> Option<u32> {
        None
    }

    fn describe(&self) -> Vec<(&'static str, InfoValue)> {
        let names = vec![
            ("name", self.name.as_str().into()),
            ("base_bdev", self.base.device().name().into()),
            ("injections", InfoValue::Number(self.faults.lock().list.len() as u64)),
        ];
        vec![("error_disk", InfoValue::Object(names))]
    }

    fn removed(&self) {
        self.faults.resume(|_| true);
    }
}

impl SharedRules {
    fn remove(&self, rules: &mut FaultRules, is_removed: impl Fn(&FaultInjection) -> bool) {
        rules.list.retain(|(rule, _)| !is_removed(rule));
        self.any.store(!rules.list.is_empty(), Ordering::Relaxed);
    }

    /// Removes rules, and has channels forward what the rules until now have kept pending.
    fn resume(&self, is_removed: impl Fn(&FaultInjection) -> bool) {
        let mut rules = self.lock();
        self.remove(&mut rules, is_removed);
        self.resumes.fetch_add(1, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, FaultRules> {
        sync::lock(&self.rules)
    }
}

impl FaultRules {
    /// The fault for a request, if a rule hits it; counts matches and hits.
    fn select_action(&mut self, request: &Request, in_flight: usize) -> Option<FaultAction> {
        let FaultRules { list, rng } = self;
        for position in 0..list.len() {
            let (injection, seen) = &mut list[position];
            if !injection.matches(request, in_flight) {
                continue;
            }
            *seen += 1;
            let hit = match injection.chance {
                Chance::Always | Chance::OneIn(0) => true,
                Chance::OneIn(every) => *seen % u64::from(every) == 0,
                Chance::PerMille(share) => rng.below(1000) < u64::from(share),
            };
            if !hit {
                continue;
            }
            let action = injection.action;
            if let Some(left) = &mut injection.count {
                *left -= 1;
                if *left == 0 {
                    list.remove(position);
                }
            }
            return Some(action);
        }
        None
    }
}

impl FaultInjection {
    fn matches(&self, request: &Request, in_flight: usize) -> bool {
        let touches = |range: &Range<u64>| {
            let end = request.lba.saturating_add(u64::from(request.blocks));
            request.op.has_range() && request.lba < range.end && range.start < end
        };
        let in_data = match self.action {
            FaultAction::Corrupt { offset, .. } => {
                // Data that has other holders cannot be changed.
                blocks_of(request).is_some_and(|data| offset < data.len() && data.is_writable())
            }
            FaultAction::Fail(_) | FaultAction::Pending => true,
        };
        self.op.is_none_or(|op| op == request.op)
            && self.range.as_ref().is_none_or(touches)
            && in_data
            && in_flight >= self.queue_depth as usize
            && self.count != Some(0)
    }
}

struct ErrorChannel {
    base: BaseChannel,
    clock: os::clock::Clock,
    faults: Arc<SharedRules>,
    resumes_applied: u64,
    /// Requests at the base: the caller's tag and flags, and the corruption of the data.
    table: Slab<ForwardedRequest>,
    /// Each with the number of resumes before it.
    pending: Vec<(u64, Request)>,
    completed: Vec<Completion>,
}

struct ForwardedRequest {
    tag: Tag,
    flags: RequestFlags,
    corrupt: Option<(usize, u8)>,
}

impl ErrorChannel {
    fn in_flight(&self) -> usize {
        self.table.len() + self.pending.len() + self.completed.len()
    }

    fn accept(&mut self, request: Request) {
        if request.op == Op::Reset {
            let pending = self.pending.drain(..);
            let aborted = pending.map(|(_, request)| request.complete(Status::ABORT_REQUESTED));
            self.completed.extend(aborted);
            return self.forward_request(request, None);
        }
        let (mut action, mut resumes) = (None, 0);
        if self.faults.any.load(Ordering::Relaxed) {
            let in_flight = self.in_flight();
            let mut rules = self.faults.lock();
            action = rules.select_action(&request, in_flight);
            resumes = self.faults.resumes.load(Ordering::Relaxed);
        }
        match action {
            None => self.forward_request(request, None),
            Some(FaultAction::Fail(status)) => self.completed.push(request.complete(status)),
            Some(FaultAction::Pending) => self.pending.push((resumes, request)),
            Some(FaultAction::Corrupt { offset, xor }) => self.forward_request(request, Some((offset, xor))),
        }
    }

    fn forward_request(&mut self, mut request: Request, corrupt: Option<(usize, u8)>) {
        if request.op == Op::Write {
            corrupt_data(&mut request, corrupt);
        }
        let forwarded = ForwardedRequest { tag: request.tag, flags: request.flags, corrupt };
        // With its new tag the base would take it for a request of its own layer.
        request.flags -= RequestFlags::INTERNAL;
        match self.table.insert(forwarded) {
            Ok(slot) => {
                request.tag = Tag(slot.to_bits());
                self.base.push(request);
            }
            Err(_) => unreachable!("the layer admits no more than the depth of {}", self.table.capacity()),
        }
    }
}

/// The completion of the caller's request for one of the base.
fn restore(table: &mut Slab<ForwardedRequest>, completion: Completion) -> Completion {
    let slot = Slot::from_bits(completion.tag().0);
    let Some(forwarded) = table.remove(slot) else {
        unreachable!("slot {slot:?} completed by the base and is not in the table")
    };
    let status = completion.status();
    let mut request = completion.into_request();
    // A read's data is corrupted after the base completed it. A write's was corrupted before; this undoes it,
    // so that the caller gets its buffer back unchanged.
    corrupt_data(&mut request, forwarded.corrupt);
    (request.tag, request.flags) = (forwarded.tag, forwarded.flags);
    request.complete(status)
}

/// The data of a request, protected or not; separate metadata is not part of it.
fn blocks_of(request: &Request) -> Option<&Data> {
    match &request.payload {
        Payload::Data(data) => Some(data),
        Payload::Protected(protected) => Some(&protected.data),
        _ => None,
    }
}

fn corrupt_data(request: &mut Request, corrupt: Option<(usize, u8)>) {
    let data = match &mut request.payload {
        Payload::Data(data) => Some(data),
        Payload::Protected(protected) => Some(&mut protected.data),
        _ => None,
    };
    if let (Some((offset, xor)), Some(data)) = (corrupt, data) {
        // It may be external memory: bytes are copied, never referenced.
        let mut byte = [0];
        data.copy_to(offset, &mut byte);
        data.copy_from(offset, &[byte[0] ^ xor]);
    }
}

impl block_io::Channel for ErrorChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        for request in batch.drain(..) {
            self.accept(request);
        }
        self.base.submit();
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        let resumes = self.faults.resumes.load(Ordering::Relaxed);
        if resumes != self.resumes_applied {
            self.resumes_applied = resumes;
            let resumed: Vec<_> = self.pending.extract_if(.., |(before, _)| *before != resumes).collect();
            resumed.into_iter().for_each(|(_, request)| self.forward_request(request, None));
        }
        let ErrorChannel { base, table, .. } = self;
        sink.extend(base.poll().map(|completion| restore(table, completion)));
        sink.append(&mut self.completed);
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        if !self.completed.is_empty() {
            return Some(0);
        }
        let recheck = (!self.pending.is_empty()).then(|| self.clock.now_ns() + RESUME_CHECK_NS);
        [self.base.deadline(), recheck].into_iter().flatten().min()
    }
}
