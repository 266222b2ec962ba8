//! A device that fails on request: what stands on it shows how it takes errors.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ring::{Op, Status, Tag};
use slots::{Slab, Slot};
use uuid::Uuid;

use super::base::{Base, Dice, follow};
use crate::{Bdev, BdevError, BoxedChannel, Completion, Device, Geometry, Registry, Request, Value};

/// How an error device is made.
#[derive(Clone, Debug)]
pub struct ErrorConfig {
    /// The device that it stands on.
    pub base: String,
    /// Its name; `EE_` and the base's where none is given.
    pub name: Option<String>,
    /// Its UUID; made up where none is given.
    pub uuid: Option<Uuid>,
    /// Decides which I/Os [`Chance::PerMille`] hits.
    pub seed: u64,
}

impl ErrorConfig {
    /// A device on `base` with the default name.
    pub fn new(base: &str) -> ErrorConfig {
        ErrorConfig { base: base.to_string(), name: None, uuid: None, seed: 0 }
    }
}

/// One kind of fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Injection {
    /// The operation that it hits; every one where none is given. Resets are never hit.
    pub op: Option<Op>,
    /// The blocks that an I/O must touch; any where none are given.
    pub range: Option<Range<u64>>,
    /// What happens.
    pub action: Action,
    /// To how many of the I/Os that match.
    pub chance: Chance,
    /// How often at most; without end where no number is given.
    pub count: Option<u64>,
    /// Only while at least so many I/Os are in flight on the channel.
    pub queue_depth: u32,
}

/// What happens to an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// It ends with this status and never reaches the device below.
    Fail(Status),
    /// It does not end until a reset, which aborts it, or [`clear`], which lets it go on.
    Pending,
    /// One byte of its data is changed: of a read in the buffer, of a write on the device below.
    Corrupt {
        /// Which byte of the I/O's data. I/Os without it pass unharmed.
        offset: usize,
        /// What it is XORed with.
        xor: u8,
    },
}

/// Which of the I/Os that match are hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chance {
    /// All.
    Always,
    /// Every so manieth, counted over all cores; 0 is all.
    OneIn(u32),
    /// So many in a thousand, by chance.
    PerMille(u16),
}

impl Injection {
    /// A fault that hits the next I/O of `op`, once.
    pub fn once(op: Option<Op>, action: Action) -> Injection {
        Injection { op, range: None, action, chance: Chance::Always, count: Some(1), queue_depth: 0 }
    }
}

/// The module's object.
pub struct Error {
    name: String,
    base: Base,
    faults: Arc<Faults>,
}

/// The faults of one device; a fault module may lock while there are any.
struct Faults {
    any: AtomicBool,
    clears: AtomicU64,
    rules: Mutex<Rules>,
}

struct Rules {
    list: Vec<(Injection, u64)>,
    dice: Dice,
}

/// Most faults at a time on one device; each is looked at for every I/O.
const INJECTIONS_MAX: usize = 64;
/// How often a core that has pending I/Os looks whether they were cleared.
const LOOK_NS: u64 = 10_000_000;

/// Makes an error device on a base, which it claims. It injects nothing yet.
pub fn create(registry: &Registry, config: ErrorConfig) -> Result<Arc<Device>, BdevError> {
    let name = config.name.unwrap_or_else(|| format!("EE_{}", config.base));
    let base = Base::claim(registry, &config.base, &format!("error bdev {name}"))?;
    let below = base.device().clone();
    let rules = Rules { list: Vec::new(), dice: Dice::new(config.seed) };
    let faults =
        Arc::new(Faults { any: AtomicBool::new(false), clears: AtomicU64::new(0), rules: Mutex::new(rules) });
    let module = Error { name: name.clone(), base, faults };
    let device = registry.register(&name, config.uuid, &[], Arc::new(module))?;
    follow(registry, &below, &device);
    Ok(device)
}

/// Adds a fault to an error device. The first that matches an I/O is the one that happens.
pub fn inject(registry: &Registry, name: &str, injection: Injection) -> Result<(), BdevError> {
    with_module(registry, name, |module| {
        let mut rules = module.faults.lock();
        if rules.list.len() >= INJECTIONS_MAX {
            let reason = format!("{name} has {INJECTIONS_MAX} faults already");
            return Err(BdevError::invalid("injection", reason));
        }
        rules.list.push((injection, 0));
        module.faults.any.store(true, Ordering::Relaxed);
        Ok(())
    })
}

/// Takes every fault away and lets pending I/Os go on.
pub fn clear(registry: &Registry, name: &str) -> Result<(), BdevError> {
    with_module(registry, name, |module| {
        module.faults.clear();
        Ok(())
    })
}

fn with_module(
    registry: &Registry,
    name: &str,
    act: impl FnOnce(&Error) -> Result<(), BdevError>,
) -> Result<(), BdevError> {
    let device = registry.find(name).ok_or_else(|| BdevError::NotFound { name: name.to_string() })?;
    match device.module::<Error>() {
        Some(module) => act(module),
        None => Err(BdevError::WrongKind { name: name.to_string(), wanted: "Error Disk" }),
    }
}

impl Bdev for Error {
    fn product_name(&self) -> &'static str {
        "Error Disk"
    }

    fn geometry(&self) -> Geometry {
        self.base.device().geometry()
    }

    fn supports(&self, op: Op) -> bool {
        op == Op::Reset || self.base.device().bdev().supports(op)
    }

    fn open(&self, core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        Ok(Box::new(Channel {
            base: self.base.channel(core)?,
            clears_seen: self.faults.clears.load(Ordering::Relaxed),
            faults: self.faults.clone(),
            table: Slab::with_capacity(self.depth() + crate::channel::RESETS_MAX as u32),
            forward: Vec::new(),
            pending: Vec::new(),
            done: Vec::new(),
            below: Vec::new(),
        }))
    }

    fn driver_specific(&self) -> Vec<(&'static str, Value)> {
        let names = vec![
            ("name", self.name.as_str().into()),
            ("base_bdev", self.base.device().name().into()),
            ("injections", Value::Number(self.faults.lock().list.len() as u64)),
        ];
        vec![("error_disk", Value::Object(names))]
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

    fn removed(&self) {
        self.faults.clear();
    }

    fn closed(&self) {
        self.base.release();
    }
}

impl Faults {
    fn clear(&self) {
        self.lock().list.clear();
        self.any.store(false, Ordering::Relaxed);
        self.clears.fetch_add(1, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, Rules> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Rules {
    /// What happens to a request, counting it.
    fn judge(&mut self, request: &Request, in_flight: usize) -> Option<Action> {
        let Rules { list, dice } = self;
        for position in 0..list.len() {
            let (injection, seen) = &mut list[position];
            if !injection.matches(request, in_flight) {
                continue;
            }
            *seen += 1;
            let hit = match injection.chance {
                Chance::Always | Chance::OneIn(0) => true,
                Chance::OneIn(every) => *seen % u64::from(every) == 0,
                Chance::PerMille(share) => dice.below(1000) < u64::from(share),
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

impl Injection {
    fn matches(&self, request: &Request, in_flight: usize) -> bool {
        let touches = |range: &Range<u64>| {
            let end = request.lba.saturating_add(u64::from(request.blocks));
            request.op.has_range() && request.lba < range.end && range.start < end
        };
        let holds = match self.action {
            Action::Corrupt { offset, .. } => {
                request.buffer.as_ref().is_some_and(|buffer| offset < buffer.len())
            }
            Action::Fail(_) | Action::Pending => true,
        };
        self.op.is_none_or(|op| op == request.op)
            && self.range.as_ref().is_none_or(touches)
            && holds
            && in_flight >= self.queue_depth as usize
            && self.count != Some(0)
    }
}

struct Channel {
    base: crate::Channel,
    faults: Arc<Faults>,
    clears_seen: u64,
    /// What each request below was called above, and what is to be done to its data.
    table: Slab<Above>,
    forward: Vec<Request>,
    pending: Vec<Request>,
    done: Vec<Completion>,
    /// Empty between calls.
    below: Vec<Completion>,
}

struct Above {
    tag: Tag,
    corrupt: Option<(usize, u8)>,
}

impl Channel {
    fn in_flight(&self) -> usize {
        self.table.len() + self.pending.len() + self.done.len()
    }

    fn take(&mut self, request: Request) {
        if request.op == Op::Reset {
            let aborted = self.pending.drain(..).map(|request| request.complete(Status::ABORT_REQUESTED));
            self.done.extend(aborted);
            return self.pass(request, None);
        }
        let action = if self.faults.any.load(Ordering::Relaxed) {
            let in_flight = self.in_flight();
            self.faults.lock().judge(&request, in_flight)
        } else {
            None
        };
        match action {
            None => self.pass(request, None),
            Some(Action::Fail(status)) => self.done.push(request.complete(status)),
            Some(Action::Pending) => self.pending.push(request),
            Some(Action::Corrupt { offset, xor }) => self.pass(request, Some((offset, xor))),
        }
    }

    fn pass(&mut self, mut request: Request, corrupt: Option<(usize, u8)>) {
        if request.op == Op::Write {
            spoil(&mut request, corrupt);
        }
        let above = Above { tag: request.tag, corrupt };
        match self.table.insert(above) {
            Ok(slot) => {
                request.tag = Tag(slot.to_bits());
                self.forward.push(request);
            }
            Err(_) => unreachable!("the layer admits no more than the depth of {}", self.table.capacity()),
        }
    }

    fn bring_up(&mut self, completion: Completion) -> Completion {
        let slot = Slot::from_bits(completion.tag().0);
        let Some(above) = self.table.remove(slot) else {
            unreachable!("slot {slot:?} completed below and is not in the table")
        };
        let status = completion.status();
        let mut request = completion.into_request();
        // A read's data is spoilt on its way up; a write's was on its way down, and the caller's
        // buffer is given back as it was.
        spoil(&mut request, above.corrupt);
        request.tag = above.tag;
        request.complete(status)
    }
}

fn spoil(request: &mut Request, corrupt: Option<(usize, u8)>) {
    if let (Some((offset, xor)), Some(buffer)) = (corrupt, &mut request.buffer) {
        // The buffer may be lent: its bytes are copied, not looked at.
        let mut byte = [0];
        buffer.copy_to(offset, &mut byte);
        buffer.copy_from(offset, &[byte[0] ^ xor]);
    }
}

impl ring::Channel for Channel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        for request in batch.drain(..) {
            self.take(request);
        }
        self.base.submit(&mut self.forward);
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        let clears = self.faults.clears.load(Ordering::Relaxed);
        if clears != self.clears_seen {
            self.clears_seen = clears;
            for request in std::mem::take(&mut self.pending) {
                self.pass(request, None);
            }
        }
        self.base.submit(&mut self.forward);
        let mut below = std::mem::take(&mut self.below);
        self.base.poll(&mut below);
        for completion in below.drain(..) {
            let completion = self.bring_up(completion);
            sink.push(completion);
        }
        self.below = below;
        sink.append(&mut self.done);
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        if !self.done.is_empty() || (!self.forward.is_empty() && self.base.outstanding() == 0) {
            return Some(0);
        }
        let look = (!self.pending.is_empty()).then(|| sys::clock::now_ns() + LOOK_NS);
        [self.base.deadline(), look].into_iter().flatten().min()
    }
}
