//! Test fixture: a reactor with a simulated controller.
#![allow(dead_code)]

#[path = "../../src/wait.rs"]
mod wait;

use std::future::Future;

use block_io::{Channel, Completion, Request, Status};
use dma::{Arena, Buffer, Data};
use nvme::testing::{SimulatedConfig, SimulatedController};
use nvme::{CommandCompletion, Controller, Namespace, Options};
use reactor::{Core, IdlePolicy, Period, Reactor};

pub(crate) use wait::next_turn;

/// A shared arena, which the simulated device can map.
pub(crate) fn arena() -> std::sync::Arc<Arena> {
    Arena::new(dma::ArenaConfig { limit_bytes: 64 << 20, hugepages: false, shared: true })
}

pub(crate) fn reactor_config(idle: IdlePolicy) -> reactor::ReactorConfig {
    reactor::ReactorConfig { arena: arena(), idle, ..reactor::ReactorConfig::default() }
}

/// Runs `body` on a reactor that steps the device every turn.
pub(crate) fn on_device<F, R>(config: SimulatedConfig, body: impl FnOnce(Core, SimulatedController) -> F) -> R
where
    F: Future<Output = R> + 'static,
    R: 'static,
{
    let reactor = Reactor::new(&reactor_config(IdlePolicy::Spin)).unwrap();
    let core = reactor.core();
    let device = SimulatedController::new(config);
    core.add_poller(device.poller(), Period::EveryTurn);
    reactor.block_on(body(core, device))
}

/// Options with short timeouts.
pub(crate) fn options() -> Options {
    Options { timeout_ns: 2_000_000_000, ..Options::default() }
}

pub(crate) async fn attach(core: &Core, device: &SimulatedController) -> Controller {
    Controller::attach_device(core, device.device(), &options()).await.unwrap()
}

pub(crate) async fn open(core: &Core, device: &SimulatedController, options: &Options) -> Namespace {
    let controller = Controller::attach_device(core, device.device(), options).await.unwrap();
    Namespace::of(&controller, core, 1, options).await.unwrap()
}

/// Submits a batch and waits for every completion; panics after five seconds.
pub(crate) async fn finish(
    _core: &Core,
    namespace: &mut Namespace,
    mut batch: Vec<Request<Data>>,
) -> Vec<Completion<Data>> {
    let want = batch.len();
    let mut done = Vec::new();
    let deadline_ns = os::clock::now_ns() + 5_000_000_000;
    while done.len() < want {
        namespace.submit(&mut batch);
        namespace.poll(&mut done);
        assert!(os::clock::now_ns() < deadline_ns, "{} of {want} completed", done.len());
        next_turn().await;
    }
    done
}

/// Executes one request and returns its status.
pub(crate) async fn status(core: &Core, namespace: &mut Namespace, request: Request<Data>) -> Status {
    finish(core, namespace, vec![request]).await[0].status()
}

/// Submits typed commands and waits for every completion; panics after five seconds.
pub(crate) async fn execute(
    namespace: &mut Namespace,
    mut batch: Vec<nvme::Command>,
) -> Vec<CommandCompletion> {
    let want = batch.len();
    let mut done = Vec::new();
    let deadline_ns = os::clock::now_ns() + 5_000_000_000;
    let pair = namespace.queue_pair().unwrap();
    while done.len() < want {
        pair.submit_commands(&mut batch);
        pair.poll_commands(&mut done);
        assert!(os::clock::now_ns() < deadline_ns, "{} of {want} completed", done.len());
        next_turn().await;
    }
    done
}

/// Waits until `holds` returns true; panics after five seconds.
pub(crate) async fn until(core: &Core, what: &str, mut holds: impl FnMut() -> bool) {
    let deadline_ns = os::clock::now_ns() + 5_000_000_000;
    while !holds() {
        assert!(os::clock::now_ns() < deadline_ns, "{what}");
        core.sleep_ns(100_000).await;
    }
}

/// A buffer filled with `fill`.
pub(crate) fn buffer(core: &Core, bytes: usize, fill: u8) -> Buffer {
    let mut buffer = core.pool().take(bytes).unwrap();
    buffer.as_mut_slice().fill(fill);
    buffer
}
