//! The driver against a controller that is broken, hostile, slow or removed.
#![allow(clippy::unwrap_used)]

mod rig;

use block_io::{Channel, Completion, Request, Status, Tag};
use dma::Data;
use nvme::testing::{DeviceFault, SimulatedConfig, SimulatedController};
use nvme::{
    AdminData, AdminError, BadCompletion, CompletionFault, CompletionInjection, Controller,
    ControllerFailure, Namespace, NvmeOpenError, Options,
};
use proptest::prelude::*;
use reactor::Core;
use rig::{attach, buffer, finish, next_turn, on_device, open, options, status, until};

fn reads(core: &Core, count: u64) -> Vec<Request<Data>> {
    (0..count).map(|tag| Request::read(Tag(tag), tag, 1, buffer(core, 512, 0))).collect()
}

/// Asserts that every tag completed once.
fn assert_each_once(done: &[Completion<Data>], count: u64) {
    let mut tags: Vec<u64> = done.iter().map(|completion| completion.tag().0).collect();
    tags.sort_unstable();
    assert_eq!(tags, (0..count).collect::<Vec<_>>());
}

/// Asserts that one invalid completion takes the controller offline and ends its access to memory.
fn offline_by(fault: DeviceFault, is_right: impl Fn(BadCompletion) -> bool + 'static) {
    on_device(SimulatedConfig::new(1024, 512), async move |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        device.inject_fault(fault);
        let done = finish(&core, &mut namespace, reads(&core, 32)).await;
        assert_each_once(&done, 32);
        let failed = done.iter().filter(|completion| !completion.status().is_success()).count();
        assert!(failed > 0 || fault == DeviceFault::DuplicateCompletion, "{fault:?}");
        let wrong = done.iter().map(Completion::status);
        assert!(wrong.into_iter().all(|status| status.is_success() || status == Status::HOST_PATHING_ERROR));
        until(&core, "the controller is offline", || namespace.controller().unwrap().failure().is_some())
            .await;
        match namespace.controller().unwrap().failure() {
            Some(ControllerFailure::BadCompletion { what, .. }) => {
                assert!(is_right(what), "{fault:?}: {what}")
            }
            other => panic!("{fault:?}: {other:?}"),
        }
        assert!(!device.can_access_memory(), "DMA of the device is disabled");
        assert_eq!(
            status(&core, &mut namespace, reads(&core, 1).remove(0)).await,
            Status::HOST_PATHING_ERROR
        );
        assert!(namespace.failure().is_some());
    });
}

#[test]
fn an_invalid_completion_takes_the_controller_offline() {
    offline_by(DeviceFault::WrongCid(1 << 8), |what| matches!(what, BadCompletion::NotInFlight(_)));
    offline_by(DeviceFault::DuplicateCompletion, |what| matches!(what, BadCompletion::NotInFlight(_)));
    offline_by(DeviceFault::WrongSqHead, |what| what == BadCompletion::SqHeadOutOfRange(u16::MAX));
    offline_by(DeviceFault::WrongSqid, |what| matches!(what, BadCompletion::WrongQueue(_)));
}

#[test]
fn a_command_identifier_without_a_slot_is_reported_as_out_of_range() {
    on_device(SimulatedConfig::new(1024, 512), async |core, device| {
        // Five slots use three index bits: 5, 6 and 7 name no slot.
        let options = Options { queue_depth: 5, ..options() };
        let mut namespace = open(&core, &device, &options).await;
        device.inject_fault(DeviceFault::WrongCid(7));
        let done = finish(&core, &mut namespace, reads(&core, 1)).await;
        assert_eq!(done[0].status(), Status::HOST_PATHING_ERROR);
        let failure = namespace.failure();
        let range = BadCompletion::CommandOutOfRange(7);
        assert_eq!(
            failure,
            Some(ControllerFailure::BadCompletion {
                qid: namespace.queue_pair().unwrap().qid(),
                what: range
            })
        );
    });
}

#[test]
fn a_controller_that_itself_reports_aborted_by_host_is_not_taken_for_a_reset() {
    on_device(SimulatedConfig::new(1024, 512), async |core, device| {
        let controller = attach(&core, &device).await;
        device.inject_fault(DeviceFault::FailAdmin(Status::ABORTED_BY_HOST));
        let view = wire_nvme::admin::GetFeatures { fid: 6, ..Default::default() };
        let answer = controller.features(&view, 0, AdminData::None).await;
        assert_eq!(answer.err(), Some(AdminError::Status(Status::ABORTED_BY_HOST)));
        assert!(controller.features(&view, 0, AdminData::None).await.is_ok());
    });
}

#[test]
fn a_reset_aborts_commands_once_and_queue_pairs_reconnect() {
    on_device(SimulatedConfig::new(1024, 512), async |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        let controller = namespace.controller().unwrap().clone();
        for round in 1..=3 {
            device.inject_fault(DeviceFault::Stall);
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
            assert!(done.iter().all(|completion| completion.request().data().is_some()));
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
fn a_timed_out_command_is_aborted_and_then_the_controller_is_reset() {
    on_device(SimulatedConfig::new(1024, 512), async |core, device| {
        let options = Options { io_timeout_ns: 20_000_000, ..options() };
        let mut namespace = open(&core, &device, &options).await;
        device.inject_fault(DeviceFault::DropCompletion);
        let done = finish(&core, &mut namespace, reads(&core, 8)).await;
        assert_each_once(&done, 8);
        let lost: Vec<_> = done.iter().filter(|completion| !completion.status().is_success()).collect();
        assert_eq!((lost.len(), lost[0].status()), (1, Status::ABORTED_BY_HOST));
        let controller = namespace.controller().unwrap().clone();
        until(&core, "the reset has completed", || controller.resets() == 1).await;
        assert_eq!(controller.aborts(), 1);
        let done = finish(&core, &mut namespace, reads(&core, 8)).await;
        assert!(done.iter().all(|completion| completion.status().is_success()));
    });
}

#[test]
fn an_injected_completion_drop_ends_with_a_reset() {
    on_device(SimulatedConfig::new(1024, 512), async |core, device| {
        let options = Options { io_timeout_ns: 20_000_000, ..options() };
        let mut namespace = open(&core, &device, &options).await;
        let injection = CompletionInjection { opcode: 2, count: 2, fault: CompletionFault::Drop };
        assert!(namespace.queue_pair().unwrap().inject(injection));
        let done = finish(&core, &mut namespace, reads(&core, 4)).await;
        assert_each_once(&done, 4);
        let lost = done.iter().filter(|completion| completion.status() == Status::ABORTED_BY_HOST).count();
        assert_eq!((lost, device.resets()), (2, 1));
    });
}

#[test]
fn a_fatal_controller_status_causes_a_reset() {
    on_device(SimulatedConfig::new(1024, 512), async |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        device.inject_fault(DeviceFault::FatalStatus);
        let done = finish(&core, &mut namespace, reads(&core, 8)).await;
        assert!(done.iter().all(|completion| completion.status() == Status::ABORTED_BY_HOST));
        let done = finish(&core, &mut namespace, reads(&core, 8)).await;
        assert!(done.iter().all(|completion| completion.status().is_success()));
    });
}

fn takes_offline_with(faults: &'static [DeviceFault], want: ControllerFailure) {
    on_device(SimulatedConfig::new(1024, 512), async move |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        let controller = namespace.controller().unwrap().clone();
        device.inject_fault(DeviceFault::Stall);
        namespace.submit(&mut reads(&core, 16));
        for fault in faults {
            device.inject_fault(*fault);
        }
        if want != ControllerFailure::Removed {
            assert_eq!(controller.reset().await, Err(want));
        }
        let mut done = Vec::new();
        while done.len() < 16 {
            namespace.poll(&mut done);
            next_turn().await;
        }
        assert_each_once(&done, 16);
        let allowed = [Status::HOST_PATHING_ERROR, Status::ABORTED_BY_HOST];
        assert!(done.iter().all(|completion| allowed.contains(&completion.status())));
        assert_eq!(controller.failure(), Some(want));
        assert!(!device.can_access_memory());
        let refused = controller.qpair(&core, &options()).await.err().unwrap();
        assert!(matches!(refused, NvmeOpenError::Failure(failure) if failure == want), "{refused}");
    });
}

#[test]
fn surprise_removal_completes_every_request() {
    takes_offline_with(&[DeviceFault::SurpriseRemoval], ControllerFailure::Removed);
}

#[test]
fn changed_capabilities_after_a_reset_take_the_controller_offline() {
    takes_offline_with(&[DeviceFault::ChangeCapabilities], ControllerFailure::CapabilitiesChanged);
}

#[test]
fn a_controller_that_cannot_be_disabled_is_reset_at_function_level() {
    on_device(SimulatedConfig::new(1024, 512), async |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        device.inject_fault(DeviceFault::ReadyStuck);
        namespace.controller().unwrap().clone().reset().await.unwrap();
        let done = finish(&core, &mut namespace, reads(&core, 8)).await;
        assert!(done.iter().all(|completion| completion.status().is_success()));
    });
}

#[test]
fn invalid_and_unsupported_controllers_are_not_attached() {
    let refused = |config: SimulatedConfig, before: Option<DeviceFault>| {
        on_device(config, async move |core, device: SimulatedController| {
            if let Some(fault) = before {
                device.inject_fault(fault);
            }
            let refused = Controller::attach_device(&core, device.device(), &options()).await.err().unwrap();
            assert!(!device.can_access_memory(), "{refused}");
            refused.to_string()
        })
    };
    let config = || SimulatedConfig::new(64, 512);
    assert!(refused(SimulatedConfig { bar_bytes: 0x1000, ..config() }, None).contains("BAR0"));
    assert!(refused(config(), Some(DeviceFault::SurpriseRemoval)).contains("removed"));
    assert!(refused(config(), Some(DeviceFault::FatalStatus)).contains("fatal"));
    assert!(refused(config(), Some(DeviceFault::ReadyStuck)).contains("did not become ready"));
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
fn invalid_and_unsupported_namespaces_are_not_opened() {
    let refused = |change: fn(&mut wire_nvme::identify::IdentifyNamespace)| {
        let mut config = SimulatedConfig::new(64, 512);
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
    on_device(SimulatedConfig::new(64, 512), async |core, device| {
        let controller = attach(&core, &device).await;
        for nsid in [0, 2, 1000, u32::MAX] {
            let refused = Namespace::of(&controller, &core, nsid, &options()).await.err().unwrap();
            assert!(matches!(refused, NvmeOpenError::NoNamespace(n) if n == nsid), "{refused}");
        }
    });
}

#[test]
fn namespace_resize_and_removal_events_are_applied() {
    on_device(SimulatedConfig::new(1024, 512), async |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        let mut larger = namespace.info().unwrap().identify.clone();
        (larger.nsze, larger.ncap) = (2048, 2048);
        device.change_namespace(1, larger.clone());
        while namespace.blocks() != 2048 {
            namespace.poll(&mut Vec::new());
            next_turn().await;
        }
        let event = namespace.controller().unwrap().next_event();
        assert_eq!(event, Some(nvme::NvmeEvent(wire_nvme::aer::AsyncEvent::NAMESPACE_CHANGED)));
        let read = Request::read(Tag(0), 2047, 1, buffer(&core, 512, 0));
        assert_eq!(status(&core, &mut namespace, read).await, Status::SUCCESS);
        larger.nsze = 0;
        device.change_namespace(1, larger.clone());
        let gone = Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry();
        let deadline_ns = os::clock::now_ns() + 5_000_000_000;
        while status(&core, &mut namespace, reads(&core, 1).remove(0)).await != gone {
            assert!(os::clock::now_ns() < deadline_ns);
        }
        larger.nsze = 100;
        device.change_namespace(1, larger);
        while namespace.blocks() != 100 {
            assert!(os::clock::now_ns() < deadline_ns);
            namespace.poll(&mut Vec::new());
            next_turn().await;
        }
        assert_eq!(status(&core, &mut namespace, reads(&core, 1).remove(0)).await, Status::SUCCESS);
    });
}

#[test]
fn an_unanswered_reset_takes_the_controller_offline() {
    on_device(SimulatedConfig::new(1024, 512), async |core, device| {
        let options = Options { timeout_ns: 100_000_000, ..options() };
        let mut namespace = open(&core, &device, &options).await;
        namespace.submit(&mut reads(&core, 4));
        device.inject_fault(DeviceFault::Stall);
        let controller = namespace.controller().unwrap().clone();
        device.inject_fault(DeviceFault::StallAfterReset);
        assert_eq!(controller.reset().await, Err(ControllerFailure::ResetFailed));
        let mut done = Vec::new();
        while done.len() < 4 {
            namespace.poll(&mut done);
            next_turn().await;
        }
        assert_each_once(&done, 4);
        assert_eq!(controller.failure(), Some(ControllerFailure::ResetFailed));
    });
}

fn any_fault() -> impl Strategy<Value = DeviceFault> {
    prop_oneof![
        8 => Just(DeviceFault::Fail(Status::UNRECOVERED_READ_ERROR)),
        2 => Just(DeviceFault::DropCompletion),
        1 => (1..=u16::MAX).prop_map(DeviceFault::WrongCid),
        1 => Just(DeviceFault::DuplicateCompletion),
        1 => Just(DeviceFault::WrongSqHead),
        1 => Just(DeviceFault::WrongSqid),
        1 => Just(DeviceFault::FatalStatus),
        1 => Just(DeviceFault::Stall),
        1 => Just(DeviceFault::StallAfterReset),
        1 => Just(DeviceFault::SurpriseRemoval),
        1 => Just(DeviceFault::ReadyStuck),
        1 => Just(DeviceFault::ChangeCapabilities),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Under any sequence of device faults each request completes once, with its buffer, and the device never writes to
    /// a buffer after its completion.
    #[test]
    fn each_request_completes_once(
        script in prop::collection::vec((0..40u64, any_fault()), 0..6),
        depth in 1..40u32,
    ) {
        on_device(SimulatedConfig::new(1024, 512), async move |core, device| {
            let options = Options {
                queue_depth: depth,
                io_timeout_ns: 10_000_000,
                timeout_ns: 200_000_000,
                ..options()
            };
            let mut namespace = open(&core, &device, &options).await;
            let mut script = script;
            let mut batch = reads(&core, 120);
            let mut done: Vec<Completion<Data>> = Vec::new();
            let mut completed: Vec<Completion<Data>> = Vec::new();
            let deadline_ns = os::clock::now_ns() + 20_000_000_000;
            while completed.len() < 120 {
                namespace.submit(&mut batch);
                namespace.poll(&mut done);
                for completion in done.drain(..) {
                    let mut request = completion.into_request();
                    let mut buffer = request.take_data().expect("a completion has its buffer");
                    buffer.copy_from(0, &vec![0xd6; buffer.len()]);
                    request.set_data(Some(buffer));
                    completed.push(request.complete(Status::SUCCESS));
                }
                let now = completed.len() as u64;
                while let Some(at) = script.iter().position(|(when, _)| *when <= now) {
                    device.inject_fault(script.remove(at).1);
                }
                assert!(os::clock::now_ns() < deadline_ns, "{} of 120 completed", completed.len());
                next_turn().await;
            }
            assert_each_once(&completed, 120);
            for _ in 0..10 {
                device.step();
                next_turn().await;
            }
            for completion in &completed {
                let bytes = completion.request().data().and_then(Data::single).unwrap().as_slice();
                assert!(bytes.iter().all(|byte| *byte == 0xd6), "written after its completion");
            }
        });
    }
}
