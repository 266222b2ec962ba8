//! The driver against a controller that is broken, hostile, slow or gone.
#![allow(clippy::unwrap_used)]

mod rig;

use memory::Buffer;
use nvme::simulated::{Config, Mischief, Simulated};
use nvme::{BadCompletion, Controller, Failure, Fault, Injection, Namespace, OpenError, Options};
use proptest::prelude::*;
use reactor::Core;
use rig::{attach, buffer, finish, next_turn, on_device, open, options, status, until};
use ring::{Channel, Completion, Request, Status, Tag};

fn reads(core: &Core, count: u64) -> Vec<Request<Buffer>> {
    (0..count).map(|tag| Request::read(Tag(tag), tag, 1, buffer(core, 512, 0))).collect()
}

/// Every tag once.
fn assert_each_once(done: &[Completion<Buffer>], count: u64) {
    let mut tags: Vec<u64> = done.iter().map(|completion| completion.tag().0).collect();
    tags.sort_unstable();
    assert_eq!(tags, (0..count).collect::<Vec<_>>());
}

/// What one wrong completion leads to.
fn offline_by(mischief: Mischief, is_right: impl Fn(BadCompletion) -> bool + 'static) {
    on_device(Config::new(1024, 512), async move |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        device.misbehave(mischief);
        let done = finish(&core, &mut namespace, reads(&core, 32)).await;
        assert_each_once(&done, 32);
        let failed = done.iter().filter(|completion| !completion.status().is_success()).count();
        assert!(failed > 0 || mischief == Mischief::Twice, "{mischief:?}");
        let wrong = done.iter().map(Completion::status);
        assert!(wrong.into_iter().all(|status| status.is_success() || status == Status::HOST_PATHING_ERROR));
        until(&core, "the controller is offline", || namespace.controller().unwrap().failure().is_some())
            .await;
        match namespace.controller().unwrap().failure() {
            Some(Failure::Queue { what, .. }) => assert!(is_right(what), "{mischief:?}: {what}"),
            other => panic!("{mischief:?}: {other:?}"),
        }
        assert!(!device.reaches_memory(), "the device was kept from memory");
        assert_eq!(
            status(&core, &mut namespace, reads(&core, 1).remove(0)).await,
            Status::HOST_PATHING_ERROR
        );
        assert!(namespace.failure().is_some());
    });
}

#[test]
fn a_completion_of_nothing_takes_the_controller_offline() {
    offline_by(Mischief::WrongCid(1 << 8), |what| matches!(what, BadCompletion::NotInFlight(_)));
    offline_by(Mischief::Twice, |what| matches!(what, BadCompletion::NotInFlight(_)));
    offline_by(Mischief::WrongHead, |what| what == BadCompletion::Head(u16::MAX));
    offline_by(Mischief::WrongQueue, |what| matches!(what, BadCompletion::WrongQueue(_)));
}

#[test]
fn an_identifier_above_any_is_named_so() {
    on_device(Config::new(1024, 512), async |core, device| {
        // Five slots are named with three bits: 5, 6 and 7 name none.
        let options = Options { queue_depth: 5, ..options() };
        let mut namespace = open(&core, &device, &options).await;
        device.misbehave(Mischief::WrongCid(7));
        let done = finish(&core, &mut namespace, reads(&core, 1)).await;
        assert_eq!(done[0].status(), Status::HOST_PATHING_ERROR);
        let failure = namespace.failure();
        let range = BadCompletion::CommandOutOfRange(7);
        assert_eq!(failure, Some(Failure::Queue { qid: namespace.queue_pair().unwrap().qid(), what: range }));
    });
}

#[test]
fn a_reset_ends_what_is_in_flight_once_and_the_queue_goes_on() {
    on_device(Config::new(1024, 512), async |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        let controller = namespace.controller().unwrap().clone();
        for round in 1..=3 {
            device.misbehave(Mischief::Stall);
            let mut batch = reads(&core, 32);
            namespace.submit(&mut batch);
            let reset = controller.clone();
            core.spawn(async move { reset.reset().await.unwrap() });
            let mut done = Vec::new();
            while done.len() < 32 {
                namespace.poll(&mut done);
                next_turn().await;
            }
            assert_each_once(&done, 32);
            assert!(done.iter().all(|completion| completion.status() == Status::ABORTED_BY_HOST));
            assert!(done.iter().all(|completion| completion.request().buffer.is_some()));
            let done = finish(&core, &mut namespace, reads(&core, 64)).await;
            assert!(done.iter().all(|completion| completion.status().is_success()), "round {round}");
            assert_eq!(namespace.queue_pair().unwrap().stats().resets, round);
        }
        controller.reset_subsystem().await.unwrap();
        controller.reset_function().await.unwrap();
        let done = finish(&core, &mut namespace, reads(&core, 8)).await;
        assert!(done.iter().all(|completion| completion.status().is_success()));
        assert_eq!(controller.resets(), 5);
    });
}

#[test]
fn a_command_that_is_never_answered_is_aborted_and_then_reset() {
    on_device(Config::new(1024, 512), async |core, device| {
        let options = Options { io_timeout_ns: 20_000_000, ..options() };
        let mut namespace = open(&core, &device, &options).await;
        device.misbehave(Mischief::Forget);
        let done = finish(&core, &mut namespace, reads(&core, 8)).await;
        assert_each_once(&done, 8);
        let lost: Vec<_> = done.iter().filter(|completion| !completion.status().is_success()).collect();
        assert_eq!((lost.len(), lost[0].status()), (1, Status::ABORTED_BY_HOST));
        let controller = namespace.controller().unwrap().clone();
        until(&core, "the reset is over", || controller.resets() == 1).await;
        assert_eq!(controller.aborts(), 1);
        let done = finish(&core, &mut namespace, reads(&core, 8)).await;
        assert!(done.iter().all(|completion| completion.status().is_success()));
    });
}

#[test]
fn a_completion_that_is_dropped_on_purpose_ends_with_a_reset() {
    on_device(Config::new(1024, 512), async |core, device| {
        let options = Options { io_timeout_ns: 20_000_000, ..options() };
        let mut namespace = open(&core, &device, &options).await;
        let injection = Injection { opcode: 2, count: 2, fault: Fault::Drop };
        assert!(namespace.queue_pair().unwrap().inject(injection));
        let done = finish(&core, &mut namespace, reads(&core, 4)).await;
        assert_each_once(&done, 4);
        let lost = done.iter().filter(|completion| completion.status() == Status::ABORTED_BY_HOST).count();
        assert_eq!((lost, device.resets()), (2, 1));
    });
}

#[test]
fn a_controller_that_fails_is_reset() {
    on_device(Config::new(1024, 512), async |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        device.misbehave(Mischief::Fatal);
        let done = finish(&core, &mut namespace, reads(&core, 8)).await;
        assert!(done.iter().all(|completion| completion.status() == Status::ABORTED_BY_HOST));
        let done = finish(&core, &mut namespace, reads(&core, 8)).await;
        assert!(done.iter().all(|completion| completion.status().is_success()));
    });
}

fn ends_with(mischief: &'static [Mischief], want: Failure) {
    on_device(Config::new(1024, 512), async move |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        let controller = namespace.controller().unwrap().clone();
        device.misbehave(Mischief::Stall);
        namespace.submit(&mut reads(&core, 16));
        for mischief in mischief {
            device.misbehave(*mischief);
        }
        if want != Failure::Removed {
            assert_eq!(controller.reset().await, Err(want));
        }
        let mut done = Vec::new();
        while done.len() < 16 {
            namespace.poll(&mut done);
            next_turn().await;
        }
        assert_each_once(&done, 16);
        let fine = [Status::HOST_PATHING_ERROR, Status::ABORTED_BY_HOST];
        assert!(done.iter().all(|completion| fine.contains(&completion.status())));
        assert_eq!(controller.failure(), Some(want));
        assert!(!device.reaches_memory());
        let refused = controller.qpair(&core, &options()).await.err().unwrap();
        assert!(matches!(refused, OpenError::Failure(failure) if failure == want), "{refused}");
    });
}

#[test]
fn removal_ends_every_request() {
    ends_with(&[Mischief::Remove], Failure::Removed);
}

#[test]
fn a_controller_that_comes_back_another_one_is_not_used() {
    ends_with(&[Mischief::ChangeCapabilities], Failure::CapabilitiesChanged);
}

#[test]
fn a_controller_that_does_not_stop_is_reset_harder() {
    on_device(Config::new(1024, 512), async |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        device.misbehave(Mischief::NeverReady);
        namespace.controller().unwrap().clone().reset().await.unwrap();
        let done = finish(&core, &mut namespace, reads(&core, 8)).await;
        assert!(done.iter().all(|completion| completion.status().is_success()));
    });
}

#[test]
fn devices_that_make_no_sense_are_not_attached() {
    let refused = |config: Config, before: Option<Mischief>| {
        on_device(config, async move |core, device: Simulated| {
            if let Some(mischief) = before {
                device.misbehave(mischief);
            }
            let refused = Controller::attach_device(&core, device.device(), &options()).await.err().unwrap();
            assert!(!device.reaches_memory(), "{refused}");
            refused.to_string()
        })
    };
    let config = || Config::new(64, 512);
    assert!(refused(Config { bar_bytes: 0x1000, ..config() }, None).contains("BAR0"));
    assert!(refused(config(), Some(Mischief::Remove)).contains("removed"));
    assert!(refused(config(), Some(Mischief::Fatal)).contains("fatal"));
    assert!(refused(config(), Some(Mischief::NeverReady)).contains("did not become ready"));
    let mut silent = config();
    silent.capabilities.nvm_command_set = false;
    assert!(refused(silent, None).contains("no NVM command set"));
    let mut pages = config();
    (pages.capabilities.page_min_log2, pages.capabilities.page_max_log2) = (20, 20);
    assert!(refused(pages, None).contains("64 KiB"));
    let mut entries = config();
    entries.identity.sqes = 0x77;
    assert!(refused(entries, None).contains("entries"));
}

#[test]
fn a_namespace_that_makes_no_sense_is_not_opened() {
    let refused = |change: fn(&mut wire_nvme::identify::IdentifyNamespace)| {
        let mut config = Config::new(64, 512);
        change(&mut config.namespaces[0]);
        on_device(config, async |core, device| {
            let controller = attach(&core, &device).await;
            Namespace::of(&controller, &core, 1, &options()).await.err().unwrap().to_string()
        })
    };
    assert!(refused(|namespace| namespace.formats[0].data_log2 = 8).contains("512 bytes"));
    assert!(refused(|namespace| namespace.dps = 5).contains("reserved type"));
    assert!(refused(|namespace| namespace.dps = 1).contains("without room"));
    assert!(refused(|namespace| namespace.formats[0].metadata_bytes = 16).contains("typed commands"));
    on_device(Config::new(64, 512), async |core, device| {
        let controller = attach(&core, &device).await;
        for nsid in [0, 2, 1000, u32::MAX] {
            let refused = Namespace::of(&controller, &core, nsid, &options()).await.err().unwrap();
            assert!(matches!(refused, OpenError::NoNamespace(n) if n == nsid), "{refused}");
        }
    });
}

#[test]
fn a_namespace_that_grows_or_goes_is_noticed() {
    on_device(Config::new(1024, 512), async |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        let mut larger = namespace.info().unwrap().identify.clone();
        (larger.nsze, larger.ncap) = (2048, 2048);
        device.change_namespace(1, larger.clone());
        while namespace.blocks() != 2048 {
            namespace.poll(&mut Vec::new());
            next_turn().await;
        }
        let event = namespace.controller().unwrap().next_event();
        assert_eq!(event, Some(nvme::Event(wire_nvme::aer::AsyncEvent::NAMESPACE_CHANGED)));
        let read = Request::read(Tag(0), 2047, 1, buffer(&core, 512, 0));
        assert_eq!(status(&core, &mut namespace, read).await, Status::SUCCESS);
        larger.nsze = 0;
        device.change_namespace(1, larger.clone());
        let gone = Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry();
        let deadline_ns = sys::clock::now_ns() + 5_000_000_000;
        while status(&core, &mut namespace, reads(&core, 1).remove(0)).await != gone {
            assert!(sys::clock::now_ns() < deadline_ns);
        }
        larger.nsze = 100;
        device.change_namespace(1, larger);
        while namespace.blocks() != 100 {
            assert!(sys::clock::now_ns() < deadline_ns);
            namespace.poll(&mut Vec::new());
            next_turn().await;
        }
        assert_eq!(status(&core, &mut namespace, reads(&core, 1).remove(0)).await, Status::SUCCESS);
    });
}

#[test]
fn a_reset_that_gets_no_answer_ends_the_controller() {
    on_device(Config::new(1024, 512), async |core, device| {
        let options = Options { timeout_ns: 100_000_000, ..options() };
        let mut namespace = open(&core, &device, &options).await;
        namespace.submit(&mut reads(&core, 4));
        device.misbehave(Mischief::Stall);
        let controller = namespace.controller().unwrap().clone();
        device.misbehave(Mischief::StallAfterReset);
        assert_eq!(controller.reset().await, Err(Failure::ResetFailed));
        let mut done = Vec::new();
        while done.len() < 4 {
            namespace.poll(&mut done);
            next_turn().await;
        }
        assert_each_once(&done, 4);
        assert_eq!(controller.failure(), Some(Failure::ResetFailed));
    });
}

fn mischief() -> impl Strategy<Value = Mischief> {
    prop_oneof![
        8 => Just(Mischief::Fail(Status::UNRECOVERED_READ_ERROR)),
        2 => Just(Mischief::Forget),
        1 => (1..=u16::MAX).prop_map(Mischief::WrongCid),
        1 => Just(Mischief::Twice),
        1 => Just(Mischief::WrongHead),
        1 => Just(Mischief::WrongQueue),
        1 => Just(Mischief::Fatal),
        1 => Just(Mischief::Stall),
        1 => Just(Mischief::StallAfterReset),
        1 => Just(Mischief::Remove),
        1 => Just(Mischief::NeverReady),
        1 => Just(Mischief::ChangeCapabilities),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Whatever the device does, each request completes once, with its buffer, and a buffer that has come
    /// back is not written any more.
    #[test]
    fn each_request_completes_once(
        script in prop::collection::vec((0..40u64, mischief()), 0..6),
        depth in 1..40u32,
    ) {
        on_device(Config::new(1024, 512), async move |core, device| {
            let options = Options {
                queue_depth: depth,
                io_timeout_ns: 10_000_000,
                timeout_ns: 200_000_000,
                ..options()
            };
            let mut namespace = open(&core, &device, &options).await;
            let mut script = script;
            let mut batch = reads(&core, 120);
            let mut done: Vec<Completion<Buffer>> = Vec::new();
            let mut guarded: Vec<Completion<Buffer>> = Vec::new();
            let deadline_ns = sys::clock::now_ns() + 20_000_000_000;
            while guarded.len() < 120 {
                namespace.submit(&mut batch);
                namespace.poll(&mut done);
                for completion in done.drain(..) {
                    let mut request = completion.into_request();
                    let mut buffer = request.buffer.take().expect("a completion has its buffer");
                    buffer.as_mut_slice().fill(0xd6);
                    request.buffer = Some(buffer);
                    guarded.push(request.complete(Status::SUCCESS));
                }
                let now = guarded.len() as u64;
                while let Some(at) = script.iter().position(|(when, _)| *when <= now) {
                    device.misbehave(script.remove(at).1);
                }
                assert!(sys::clock::now_ns() < deadline_ns, "{} of 120 completed", guarded.len());
                next_turn().await;
            }
            assert_each_once(&guarded, 120);
            for _ in 0..10 {
                device.step();
                next_turn().await;
            }
            for completion in &guarded {
                let bytes = completion.request().buffer.as_ref().unwrap().as_slice();
                assert!(bytes.iter().all(|byte| *byte == 0xd6), "written after its completion");
            }
        });
    }
}
