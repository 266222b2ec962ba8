//! A reactor with a simulated controller on it.
#![allow(dead_code)]

#[path = "../../src/wait.rs"]
mod wait;

use std::future::Future;

use memory::{Arena, Buffer};
use nvme::simulated::{Config, Simulated};
use nvme::{Controller, Executed, Namespace, Options};
use reactor::{Core, IdlePolicy, Period, Reactor};
use ring::{Channel, Completion, Request, Status};

pub(crate) use wait::next_turn;

/// An arena that the simulated device can see.
pub(crate) fn arena() -> std::sync::Arc<Arena> {
    Arena::new(memory::Config { limit_bytes: 64 << 20, hugepages: false, shared: true })
}

pub(crate) fn reactor_config(idle: IdlePolicy) -> reactor::Config {
    reactor::Config { arena: arena(), idle, ..reactor::Config::default() }
}

/// Runs `body` on a reactor on which the device is stepped every turn.
pub(crate) fn on_device<F, R>(config: Config, body: impl FnOnce(Core, Simulated) -> F) -> R
where
    F: Future<Output = R> + 'static,
    R: 'static,
{
    let reactor = Reactor::new(&reactor_config(IdlePolicy::Spin)).unwrap();
    let core = reactor.core();
    let device = Simulated::new(config);
    core.add_poller(device.poller(), Period::EveryTurn);
    reactor.block_on(body(core, device))
}

/// Options that give up soon.
pub(crate) fn options() -> Options {
    Options { timeout_ns: 2_000_000_000, ..Options::default() }
}

pub(crate) async fn attach(core: &Core, device: &Simulated) -> Controller {
    Controller::attach_device(core, device.device(), &options()).await.unwrap()
}

pub(crate) async fn open(core: &Core, device: &Simulated, options: &Options) -> Namespace {
    let controller = Controller::attach_device(core, device.device(), options).await.unwrap();
    Namespace::of(&controller, core, 1, options).await.unwrap()
}

/// Submits everything and waits for every completion; fails when that takes more than five seconds.
pub(crate) async fn finish(
    _core: &Core,
    namespace: &mut Namespace,
    mut batch: Vec<Request<Buffer>>,
) -> Vec<Completion<Buffer>> {
    let want = batch.len();
    let mut done = Vec::new();
    let deadline_ns = sys::clock::now_ns() + 5_000_000_000;
    while done.len() < want {
        namespace.submit(&mut batch);
        namespace.poll(&mut done);
        assert!(sys::clock::now_ns() < deadline_ns, "{} of {want} completed", done.len());
        next_turn().await;
    }
    done
}

/// One request's status.
pub(crate) async fn status(core: &Core, namespace: &mut Namespace, request: Request<Buffer>) -> Status {
    finish(core, namespace, vec![request]).await[0].status()
}

/// Submits typed commands and waits for all of them.
pub(crate) async fn execute(namespace: &mut Namespace, mut batch: Vec<nvme::Command>) -> Vec<Executed> {
    let want = batch.len();
    let mut done = Vec::new();
    let deadline_ns = sys::clock::now_ns() + 5_000_000_000;
    let pair = namespace.queue_pair().unwrap();
    while done.len() < want {
        pair.submit_commands(&mut batch);
        pair.poll_commands(&mut done);
        assert!(sys::clock::now_ns() < deadline_ns, "{} of {want} completed", done.len());
        next_turn().await;
    }
    done
}

/// Waits until something holds; fails when that takes more than five seconds.
pub(crate) async fn until(core: &Core, what: &str, mut holds: impl FnMut() -> bool) {
    let deadline_ns = sys::clock::now_ns() + 5_000_000_000;
    while !holds() {
        assert!(sys::clock::now_ns() < deadline_ns, "{what}");
        core.sleep_ns(100_000).await;
    }
}

/// A buffer filled with one byte.
pub(crate) fn buffer(core: &Core, bytes: usize, fill: u8) -> Buffer {
    let mut buffer = core.pool().take(bytes).unwrap();
    buffer.as_mut_slice().fill(fill);
    buffer
}
