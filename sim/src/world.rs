//! A world: nodes with cores, links between them, and virtual time, all on one thread.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard};

use dma::Arena;
use os::clock::VirtualClock;
use random::WyRand;
use reactor::blocking::{self, Driver};
use reactor::{Core, Reactor, ReactorConfig, ReactorHandle};

use crate::fabric::{CoreId, Fabric, FabricOptions, LinkConfig, NodeId, SimulatedPlace};

/// When a world begins: not at 0, which code uses for "at once".
const START_NS: u64 = 1_000_000_000;
/// Time of a turn that did something, at least and at most, in nanoseconds.
const TURN_NS: (u64, u64) = (300, 3_000);
/// Turns without a change of time after which a world is taken to be stuck.
const TURNS_MAX: u64 = 1_000_000;
/// Step of the time if nothing is due: a control thread may wait for a timeout.
const IDLE_STEP_NS: u64 = 1_000_000;

type Worker = Box<dyn FnMut() -> Option<usize>>;

/// N nodes of several cores each, in virtual time.
///
/// It owns the clock, the reactors and the links, and decides who turns next: the core whose turn is due first, then
/// the one with the lower number. A turn that did something takes a random time, so that seeds differ in the order of
/// cores. The control plane of a node runs on the thread of the world: while it waits, the world runs
/// ([`reactor::blocking`]). A node is [booted](Self::boot), [paused](Self::pause) and [crashed](Self::crash); the
/// scenario holds its targets, initiators and disks and drops them with the node.
///
/// Equal seeds give equal runs, which [`trace`](Self::trace) shows. A step costs about a microsecond.
#[derive(Clone)]
pub struct World(Rc<WorldInner>);

struct WorldInner {
    clock: VirtualClock,
    fabric: Arc<Mutex<Fabric>>,
    nodes: RefCell<Vec<Node>>,
    workers: RefCell<Vec<Worker>>,
    random: RefCell<WyRand>,
    arena: Arc<Arena>,
    trace: Cell<u64>,
    turns: Cell<u64>,
    turns_at_this_time: Cell<u64>,
}

struct Node {
    cores: Vec<SimulatedCore>,
    paused: bool,
    boots: u64,
}

struct SimulatedCore {
    /// `None` while it turns.
    reactor: Option<Reactor>,
    core: Core,
    /// The end of its last turn.
    busy_until_ns: u64,
    /// `u64::MAX` if only an event wakes it.
    next_turn_ns: u64,
}

thread_local! {
    /// One arena serves all worlds of a thread, one after the other.
    static ARENA: Arc<Arena> = Arena::new(dma::ArenaConfig {
        limit_bytes: 256 << 20,
        hugepages: false,
        shared: false,
    });
}

impl World {
    /// A world without nodes. It becomes the driver of this thread's waits until [`end`](Self::end).
    pub fn new(seed: u64, options: FabricOptions) -> World {
        let mut random = WyRand::new(seed);
        let clock = VirtualClock::default();
        clock.advance_to(START_NS);
        let mut fabric = Fabric::new(random.split(), options);
        fabric.advance_to(START_NS);
        let world = World(Rc::new(WorldInner {
            clock,
            fabric: Arc::new(Mutex::new(fabric)),
            nodes: RefCell::default(),
            workers: RefCell::default(),
            random: RefCell::new(random),
            arena: ARENA.with(Clone::clone),
            trace: Cell::new(0xcbf2_9ce4_8422_2325),
            turns: Cell::new(0),
            turns_at_this_time: Cell::new(0),
        }));
        blocking::install(Some(Rc::new(world.clone())));
        world
    }

    /// Adds a node that is not running.
    pub fn add_node(&self) -> NodeId {
        let mut nodes = self.0.nodes.borrow_mut();
        nodes.push(Node { cores: Vec::new(), paused: false, boots: 0 });
        nodes.len() - 1
    }

    /// Starts the reactors of a node.
    ///
    /// # Panics
    /// If it runs.
    pub fn boot(&self, node: NodeId, cores: u32) -> Vec<ReactorHandle> {
        let seed = self.0.random.borrow_mut().next_bits();
        let config = ReactorConfig::simulated(self.0.clock.clone(), seed, cores, &self.0.arena);
        let mut nodes = self.0.nodes.borrow_mut();
        let state = &mut nodes[node];
        assert!(state.cores.is_empty(), "node {node} runs already");
        (state.paused, state.boots) = (false, state.boots + 1);
        let now_ns = self.0.clock.now_ns();
        let make = |index| {
            let reactor = Reactor::for_core(&config, index).expect("a virtual event loop needs nothing");
            let core = reactor.core();
            let id = CoreId { node, core: index };
            let place = SimulatedPlace { fabric: self.0.fabric.clone(), core: id };
            assert!(core.attach_environment(Rc::new(place)), "a new core has no environment");
            SimulatedCore { reactor: Some(reactor), core, busy_until_ns: now_ns, next_turn_ns: now_ns }
        };
        state.cores = (0..cores as usize).map(make).collect();
        state.cores.iter().filter_map(|core| core.reactor.as_ref()).map(Reactor::handle).collect()
    }

    /// Ends a node's processes where they stand.
    pub fn crash(&self, node: NodeId) {
        self.fabric().crash(node);
        let cores = std::mem::take(&mut self.0.nodes.borrow_mut()[node].cores);
        cores.into_iter().filter_map(|core| core.reactor).for_each(Reactor::discard);
    }

    /// Stops the cores of a node, or lets them continue. Meanwhile its sockets fill.
    pub fn pause(&self, node: NodeId, paused: bool) {
        self.0.nodes.borrow_mut()[node].paused = paused;
    }

    /// Whether the node has been booted and not crashed since.
    pub fn is_running(&self, node: NodeId) -> bool {
        !self.0.nodes.borrow()[node].cores.is_empty()
    }

    /// Changes one direction between two nodes.
    pub fn set_link(&self, from: NodeId, to: NodeId, config: LinkConfig) {
        self.fabric().set_link(from, to, config);
    }

    /// Blocks or opens one direction between two nodes.
    pub fn block(&self, from: NodeId, to: NodeId, blocked: bool) {
        let mut fabric = self.fabric();
        let config = LinkConfig { blocked, ..fabric.link(from, to) };
        fabric.set_link(from, to, config);
    }

    /// The cores of a running node.
    pub fn cores(&self, node: NodeId) -> Vec<Core> {
        self.0.nodes.borrow()[node].cores.iter().map(|core| core.core.clone()).collect()
    }

    /// The time in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        self.0.clock.now_ns()
    }

    /// A generator for the scenario.
    pub fn rng(&self) -> WyRand {
        self.0.random.borrow_mut().split()
    }

    /// A hash of all turns so far: equal for equal runs.
    pub fn trace(&self) -> u64 {
        self.0.trace.get()
    }

    /// Turns of all cores so far.
    pub fn turns(&self) -> u64 {
        self.0.turns.get()
    }

    /// Runs until the time is `end_ns`.
    pub fn run_until(&self, end_ns: u64) {
        while self.next_ns().is_some_and(|next_ns| next_ns <= end_ns) {
            self.step();
        }
        self.advance_to(end_ns.max(self.now_ns()));
    }

    /// Ends the world: crashes all nodes and makes waits of this thread block again. What lives on its cores must be
    /// dropped before or after without waiting.
    pub fn end(&self) {
        let count = self.0.nodes.borrow().len();
        for node in 0..count {
            self.crash(node);
        }
        self.0.workers.borrow_mut().clear();
        blocking::install(None);
    }

    fn fabric(&self) -> MutexGuard<'_, Fabric> {
        sync::lock(&self.0.fabric)
    }

    /// The core whose turn is due first, with its time.
    fn next_core(&self) -> Option<(u64, CoreId)> {
        let nodes = self.0.nodes.borrow();
        let running = nodes.iter().enumerate().filter(|(_, node)| !node.paused);
        let cores = running.flat_map(|(node, state)| {
            let id = move |core| CoreId { node, core };
            state.cores.iter().enumerate().map(move |(index, core)| (core.next_turn_ns, id(index)))
        });
        cores.min().filter(|(at_ns, _)| *at_ns != u64::MAX)
    }

    fn next_ns(&self) -> Option<u64> {
        let core = self.next_core().map(|(at_ns, _)| at_ns);
        [core, self.fabric().next_delivery_ns()].into_iter().flatten().min()
    }

    fn advance_to(&self, now_ns: u64) {
        if now_ns > self.now_ns() {
            self.0.turns_at_this_time.set(0);
        }
        self.0.clock.advance_to(now_ns);
        let mut fabric = self.fabric();
        fabric.advance_to(now_ns);
        let ready = fabric.take_ready();
        drop(fabric);
        for id in ready {
            let mut nodes = self.0.nodes.borrow_mut();
            if let Some(core) = nodes[id.node].cores.get_mut(id.core) {
                core.core.event_loop().raise_event();
                core.wake(now_ns);
            }
        }
    }

    /// Lets the time pass until something is due, and does that.
    fn step(&self) {
        let now_ns = self.now_ns();
        let delivery_ns = self.fabric().next_delivery_ns();
        match (self.next_core(), delivery_ns) {
            (Some((turn_ns, id)), delivery_ns) if delivery_ns.is_none_or(|at_ns| turn_ns < at_ns) => {
                self.advance_to(turn_ns.max(now_ns));
                self.turn(id);
            }
            (_, Some(delivery_ns)) => self.advance_to(delivery_ns.max(now_ns)),
            (_, None) => self.advance_to(now_ns + IDLE_STEP_NS),
        }
        self.collect_wakes();
        self.run_workers();
    }

    fn turn(&self, id: CoreId) {
        let now_ns = self.now_ns();
        let reactor = self.0.nodes.borrow_mut()[id.node].cores[id.core].reactor.take();
        let mut reactor = reactor.expect("a turn does not wait for a reactor");
        let worked = reactor.turn();
        let deadline_ns = reactor.deadline();
        let cost_ns = TURN_NS.0 + self.0.random.borrow_mut().below(TURN_NS.1 - TURN_NS.0);
        let mut nodes = self.0.nodes.borrow_mut();
        let core = &mut nodes[id.node].cores[id.core];
        core.reactor = Some(reactor);
        core.busy_until_ns = now_ns + cost_ns;
        core.next_turn_ns = match deadline_ns {
            _ if worked => core.busy_until_ns,
            Some(deadline_ns) => deadline_ns.max(core.busy_until_ns),
            None => u64::MAX,
        };
        drop(nodes);
        self.0.turns.set(self.0.turns.get() + 1);
        self.0.turns_at_this_time.set(self.0.turns_at_this_time.get() + 1);
        assert!(self.0.turns_at_this_time.get() < TURNS_MAX, "time stands still at {now_ns} ns");
        let word = now_ns ^ (id.node as u64) << 56 ^ (id.core as u64) << 48 ^ u64::from(worked) << 63;
        self.0.trace.set((self.0.trace.get() ^ word).wrapping_mul(0x0100_0000_01b3));
    }

    /// Makes the cores turn that a message or a waker woke.
    fn collect_wakes(&self) {
        let now_ns = self.now_ns();
        for node in &mut *self.0.nodes.borrow_mut() {
            for core in &mut node.cores {
                if core.core.event_loop().take_wake() {
                    core.wake(now_ns);
                }
            }
        }
    }

    fn run_workers(&self) {
        let mut workers = std::mem::take(&mut *self.0.workers.borrow_mut());
        let mut count = 0;
        workers.retain_mut(|work| match work() {
            Some(handled) => {
                count += handled;
                true
            }
            None => false,
        });
        // A worker may have started others.
        self.0.workers.borrow_mut().splice(0..0, workers);
        if count > 0 {
            self.collect_wakes();
        }
    }
}

impl SimulatedCore {
    fn wake(&mut self, now_ns: u64) {
        self.next_turn_ns = self.next_turn_ns.min(self.busy_until_ns.max(now_ns));
    }
}

impl Driver for World {
    fn step(&self) -> bool {
        World::step(self);
        true
    }

    fn now_ns(&self) -> u64 {
        World::now_ns(self)
    }

    fn add_worker(&self, work: Worker) {
        self.0.workers.borrow_mut().push(work);
    }
}
