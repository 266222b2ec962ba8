//! Arbitrary behavior of a malicious device: each request of the driver completes once, with its buffer, and
//! no input of the device causes a panic.
#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use dma::Arena;
use nvme::testing::{DeviceFault, SimulatedConfig, SimulatedController};
use nvme::{Controller, Namespace, Options};
use reactor::{IdlePolicy, Period, Reactor};
use block_io::{Channel, Request, Status, Tag};

const REQUESTS: u64 = 48;

/// One fault of the device, from two bytes.
fn decode_fault(kind: u8, value: u8) -> Option<DeviceFault> {
    Some(match kind % 16 {
        0 => DeviceFault::WrongCid(u16::from(value) << 4 | 1),
        1 => DeviceFault::WrongCid(u16::from(value)),
        2 => DeviceFault::DuplicateCompletion,
        3 => DeviceFault::WrongSqHead,
        4 => DeviceFault::WrongSqid,
        5 => DeviceFault::DropCompletion,
        6 => DeviceFault::Fail(Status::new(value >> 5, value)),
        7 => DeviceFault::FatalStatus,
        8 => DeviceFault::SurpriseRemoval,
        9 => DeviceFault::Stall,
        10 => DeviceFault::ChangeCapabilities,
        _ => return None,
    })
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&[depth, identify, at], script)) = bytes.split_first_chunk::<3>() else { return };
    let mut config = SimulatedConfig::new(1024, 512);
    config.queues = u32::from(depth % 3) + 1;
    config.capabilities.doorbell_stride_log2 = identify & 3;
    config.capabilities.queue_entries_max = u32::from(at) + 2;
    config.identity.mdts = identify >> 2 & 0xf;
    config.namespaces[0].dps = identify >> 6;
    config.identity.sgls = u32::from(identify & 1);
    let arena: Arc<Arena> =
        Arena::new(dma::ArenaConfig { limit_bytes: 16 << 20, hugepages: false, shared: true });
    let reactor =
        Reactor::new(&reactor::ReactorConfig { arena, idle: IdlePolicy::Spin, ..Default::default() });
    let Ok(reactor) = reactor else { return };
    let core = reactor.core();
    let device = SimulatedController::new(config);
    core.add_poller(device.poller(), Period::EveryTurn);
    let script = script.to_vec();
    reactor.block_on(async move {
        let options = Options {
            queue_depth: u32::from(depth) + 1,
            io_timeout_ns: 5_000_000,
            timeout_ns: 200_000_000,
            ..Options::default()
        };
        let Ok(controller) = Controller::attach_device(&core, device.device(), &options).await else {
            return;
        };
        let Ok(mut namespace) = Namespace::of(&controller, &core, 1, &options).await else { return };
        let mut script = script.chunks_exact(2);
        let buffer = || core.pool().take(512).expect("512 bytes are below the limit");
        let mut batch: Vec<_> = (0..REQUESTS).map(|tag| Request::read(Tag(tag), tag, 1, buffer())).collect();
        let (mut completions, mut completed) = (Vec::new(), [false; REQUESTS as usize]);
        let mut count = 0;
        while count < REQUESTS {
            if let Some(&[kind, value]) = script.next()
                && let Some(fault) = decode_fault(kind, value)
            {
                device.inject_fault(fault);
            }
            namespace.submit(&mut batch);
            namespace.poll(&mut completions);
            for completion in completions.drain(..) {
                let tag = completion.tag().0 as usize;
                assert!(!std::mem::replace(&mut completed[tag], true), "request {tag} completed twice");
                assert!(completion.request().data().is_some(), "request {tag} lost its buffer");
                count += 1;
            }
            core.sleep_ns(20_000).await;
        }
    });
});
