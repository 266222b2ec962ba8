//! Hosts that authenticate to the target: Ringbolt's own initiator, over the loopback interface.
#![allow(clippy::unwrap_used)]

mod secrets;

use block_io::{Channel, Op, Request, Status, Tag};
use nvme::{
    AnyController, ControllerFailure, HostCredentials, IoQueue, MetadataFormat, Namespace, NvmeOpenError,
    Options,
};
use nvme_auth::{AuthFailure, AuthHash, AuthKeys, AuthMessageKind, AuthOptions, DhGroup, HostAuthError};
use nvmf::{NvmfTarget, TcpTransportConfig};
use reactor::{Core, IdlePolicy, ReactorConfig};
use secrets::{Rig, keys, on_host};
use wire_nvme::identify::{IdentifyNamespace, LbaFormat};

const NQN: &str = "nqn.2026-11.io.ringbolt:a";
const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555";

/// A target with a subsystem.
fn rig(test: &str) -> Rig {
    let config = ReactorConfig { idle: IdlePolicy::Sleep, ..ReactorConfig::default() };
    Rig::start(&format!("authentication-{test}"), &config, TcpTransportConfig::default(), &[NQN])
}

fn only(hash: AuthHash, group: DhGroup) -> AuthOptions {
    AuthOptions { hashes: vec![hash], groups: vec![group] }
}

fn quick() -> AuthOptions {
    only(AuthHash::Sha256, DhGroup::Null)
}

impl Rig {
    fn allow(&self, keys: &AuthKeys) {
        self.target.add_host_with_keys(NQN, HOST, self.host_keys(keys)).unwrap();
    }

    /// Opens the namespace and executes a command on it.
    fn open(&self, keys: Option<AuthKeys>, options: AuthOptions) -> Result<(), NvmeOpenError> {
        let uri = format!("nvme+tcp://127.0.0.1:{}/{NQN}?ns=1", self.plain).parse().unwrap();
        let options = options_of(keys, options);
        on_host(|core| async move {
            let mut namespace = Namespace::open(&core, &uri, &options).await?;
            assert!(namespace.run(Request::new(Tag(0), Op::Flush, 0, 0)).await.status().is_success());
            Ok(())
        })
    }
}

fn options_of(keys: Option<AuthKeys>, options: AuthOptions) -> Options {
    Options {
        hostnqn: Some(HOST.parse().unwrap()),
        authentication: keys.map(|keys| HostCredentials::new(Some(keys), options)),
        ..Options::default()
    }
}

#[test]
fn a_host_authenticates_with_each_hash_and_group_one_way_and_mutually() {
    for mutual in [None, Some(2)] {
        let rig = rig(&format!("each-{}", mutual.is_some()));
        rig.allow(&keys(1, mutual));
        for hash in AuthHash::ALL {
            rig.open(Some(keys(1, mutual)), only(*hash, DhGroup::Null)).unwrap();
        }
        for group in &DhGroup::ALL[1..] {
            rig.open(Some(keys(1, mutual)), only(AuthHash::Sha384, *group)).unwrap();
        }
    }
}

/// Their exponentiations wait for one another.
#[test]
fn hosts_that_come_together_authenticate_one_after_the_other() {
    let rig = rig("together");
    rig.allow(&keys(1, Some(2)));
    std::thread::scope(|scope| {
        for _ in 0..6 {
            let large = only(AuthHash::Sha256, DhGroup::Ffdhe3072);
            scope.spawn(|| rig.open(Some(keys(1, Some(2))), large).unwrap());
        }
    });
}

#[test]
fn a_host_without_the_right_key_reaches_nothing() {
    let rig = rig("wrong");
    rig.allow(&keys(1, None));
    assert!(matches!(rig.open(None, quick()), Err(NvmeOpenError::KeyRequired)));
    let rejected = |result| match result {
        Err(NvmeOpenError::Authentication(0, HostAuthError::Rejected(reason))) => reason,
        other => panic!("{other:?}"),
    };
    assert_eq!(rejected(rig.open(Some(keys(2, None)), quick())), AuthFailure::Failed);
    // The target has no key of its own to prove.
    assert_eq!(rejected(rig.open(Some(keys(1, Some(2))), quick())), AuthFailure::Failed);
    // It serves others all the same.
    rig.open(Some(keys(1, None)), quick()).unwrap();
}

#[test]
fn a_host_does_not_accept_a_target_without_its_key() {
    let rig = rig("mutual");
    rig.allow(&keys(1, Some(2)));
    let result = rig.open(Some(keys(1, Some(3))), quick());
    let expected = HostAuthError::ControllerNotProven;
    assert!(
        matches!(result, Err(NvmeOpenError::Authentication(0, error)) if error == expected),
        "{result:?}"
    );
    rig.open(Some(keys(1, Some(2))), quick()).unwrap();
    // Nor one that does not want the host to authenticate.
    rig.target.set_host_keys(NQN, HOST, None).unwrap();
    assert!(rig.open(Some(keys(1, Some(2))), quick()).is_err());
    rig.open(Some(keys(1, None)), quick()).unwrap();
    rig.open(None, quick()).unwrap();
}

#[test]
fn digests_and_groups_are_those_that_the_target_accepts() {
    let rig = rig("options");
    rig.allow(&keys(1, None));
    rig.target.set_auth_options(only(AuthHash::Sha512, DhGroup::Ffdhe2048)).unwrap();
    let rejected = |options| match rig.open(Some(keys(1, None)), options) {
        Err(NvmeOpenError::Authentication(0, HostAuthError::Rejected(reason))) => reason,
        other => panic!("{other:?}"),
    };
    assert_eq!(rejected(quick()), AuthFailure::HashNotUsable);
    assert_eq!(rejected(only(AuthHash::Sha512, DhGroup::Null)), AuthFailure::GroupNotUsable);
    rig.open(Some(keys(1, None)), AuthOptions::default()).unwrap();
}

#[test]
fn a_connected_host_stays_when_its_keys_change_and_needs_the_new_ones_to_connect() {
    let rig = rig("changed");
    rig.allow(&keys(1, None));
    let uri = format!("nvme+tcp://127.0.0.1:{}/{NQN}?ns=1", rig.plain).parse().unwrap();
    let (target, new) = (rig.target.clone(), rig.host_keys(&keys(2, None)));
    on_host(|core| async move {
        let options = options_of(Some(keys(1, None)), quick());
        let mut namespace = Namespace::open(&core, &uri, &options).await.unwrap();
        target.set_host_keys(NQN, HOST, Some(new)).unwrap();
        assert!(namespace.run(Request::new(Tag(0), Op::Flush, 0, 0)).await.status().is_success());
        let again = Namespace::open(&core, &uri, &options).await.map(drop);
        assert!(matches!(again, Err(NvmeOpenError::Authentication(0, _))), "{again:?}");
        // The clones share the keys.
        options.authentication.as_ref().unwrap().clone().set_keys(Some(keys(2, None)));
        Namespace::open(&core, &uri, &options).await.unwrap();
    });
}

/// Commands that the target has received on an I/O queue.
fn commands_of(target: &NvmfTarget, qid: u16) -> u64 {
    let qpairs = target.qpairs(NQN).unwrap();
    qpairs.iter().find(|qpair| qpair.qid == qid).unwrap().commands
}

/// An I/O queue of the namespace that the rig has.
async fn io_queue(core: &Core, controller: &AnyController) -> Box<dyn IoQueue> {
    let identify = IdentifyNamespace {
        nsze: 2048,
        formats: vec![LbaFormat { metadata_bytes: 0, data_log2: 9, performance: 0 }],
        ..IdentifyNamespace::default()
    };
    controller.io_queues().open(core, 1, &identify, &MetadataFormat::default()).await.unwrap()
}

/// Flushes, with the tag that the driver's own commands have too.
async fn flush(core: &Core, queue: &mut dyn IoQueue) -> Status {
    let (mut batch, mut done) = (vec![Request::new(Tag(u64::MAX), Op::Flush, 0, 0)], Vec::new());
    loop {
        queue.submit(&mut batch);
        queue.poll(&mut done);
        match done.pop() {
            Some(completion) => return completion.status(),
            None => core.sleep_ns(100_000).await,
        }
    }
}

#[test]
fn an_io_queue_authenticates_with_new_keys_after_the_admin_queue_and_between_its_commands() {
    for (name, mutual, group) in [("one-way", None, DhGroup::Null), ("both", Some(7), DhGroup::Ffdhe2048)] {
        let rig = rig(&format!("queue-{name}"));
        rig.allow(&keys(1, mutual));
        let uri = format!("nvme+tcp://127.0.0.1:{}/{NQN}?ns=1", rig.plain).parse().unwrap();
        let target = rig.target.clone();
        let (new, third) = (rig.host_keys(&keys(2, mutual)), rig.host_keys(&keys(3, mutual)));
        on_host(|core| async move {
            let options = options_of(Some(keys(1, mutual)), only(AuthHash::Sha256, group));
            let credentials = options.authentication.clone().unwrap();
            let mut controller = AnyController::attach(&core, &uri, &options, 1).await.unwrap();
            let mut queue = io_queue(&core, &controller).await;
            let before = commands_of(&target, 1);
            target.set_host_keys(NQN, HOST, Some(new)).unwrap();
            credentials.set_keys(Some(keys(2, mutual)));
            // Not before the admin queue: some controllers take new keys with its exchange.
            for _ in 0..20 {
                assert_eq!(flush(&core, &mut *queue).await, Status::SUCCESS, "{name}");
            }
            assert_eq!(commands_of(&target, 1) - before, 20, "{name}: the admin queue has not authenticated");
            controller.reauthenticate().await.unwrap();
            let deadline_ns = core.now_ns() + 30_000_000_000;
            // Send, Receive, Send and Receive, and Send if the controller proves its key too.
            let exchange = if mutual.is_some() { 5 } else { 4 };
            let mut flushed = 20;
            while commands_of(&target, 1) - before < flushed + exchange {
                assert!(core.now_ns() < deadline_ns, "{name}: no exchange");
                assert_eq!(flush(&core, &mut *queue).await, Status::SUCCESS, "{name}");
                flushed += 1;
            }
            for _ in 0..20 {
                assert_eq!(flush(&core, &mut *queue).await, Status::SUCCESS, "{name}");
            }
            let received = commands_of(&target, 1) - before;
            assert_eq!(received, flushed + exchange + 20, "{name}: there is one exchange");
            assert_eq!(queue.failure(), None, "{name}");

            // The host gets keys that the target does not have before the I/O queue has authenticated.
            target.set_host_keys(NQN, HOST, Some(third)).unwrap();
            credentials.set_keys(Some(keys(3, mutual)));
            controller.reauthenticate().await.unwrap();
            credentials.set_keys(Some(keys(4, mutual)));
            while queue.failure().is_none() {
                assert!(core.now_ns() < deadline_ns, "{name}: the queue is still in use");
                flush(&core, &mut *queue).await;
            }
            assert_eq!(queue.failure(), Some(ControllerFailure::Reauthentication), "{name}");
            assert_eq!(controller.failure(), None, "{name}: the admin queue has the right keys");
        });
    }
}

#[test]
fn an_admin_queue_authenticates_with_new_keys() {
    let rig = rig("admin");
    rig.allow(&keys(1, Some(2)));
    let uri = format!("nvme+tcp://127.0.0.1:{}/{NQN}?ns=1", rig.plain).parse().unwrap();
    let (target, new) = (rig.target.clone(), rig.host_keys(&keys(3, Some(4))));
    on_host(|core| async move {
        let options = options_of(Some(keys(1, Some(2))), quick());
        let credentials = options.authentication.clone().unwrap();
        let mut controller = AnyController::attach(&core, &uri, &options, 1).await.unwrap();
        let before = commands_of(&target, 0);
        controller.reauthenticate().await.unwrap();
        assert_eq!(commands_of(&target, 0), before, "the keys are the same");
        target.set_host_keys(NQN, HOST, Some(new)).unwrap();
        credentials.set_keys(Some(keys(3, Some(4))));
        controller.reauthenticate().await.unwrap();
        assert!(commands_of(&target, 0) >= before + 5);
        assert_eq!(controller.failure(), None);
        // Without keys it stays as it is.
        credentials.set_keys(None);
        controller.reauthenticate().await.unwrap();
        credentials.set_keys(Some(keys(3, Some(5))));
        let refused = controller.reauthenticate().await;
        let expected = HostAuthError::ControllerNotProven;
        assert!(
            matches!(refused, Err(NvmeOpenError::Authentication(0, error)) if error == expected),
            "{refused:?}"
        );
        assert!(controller.failure().is_some());
    });
}

#[test]
fn a_host_that_is_connected_without_is_disconnected_when_it_gets_a_key() {
    let rig = rig("demanded");
    rig.target.add_host(NQN, HOST).unwrap();
    let uri = format!("nvme+tcp://127.0.0.1:{}/{NQN}?ns=1", rig.plain).parse().unwrap();
    let (target, new) = (rig.target.clone(), rig.host_keys(&keys(1, None)));
    on_host(|core| async move {
        let options = options_of(None, quick());
        let mut namespace = Namespace::open(&core, &uri, &options).await.unwrap();
        assert!(namespace.run(Request::new(Tag(0), Op::Flush, 0, 0)).await.status().is_success());
        target.set_host_keys(NQN, HOST, Some(new)).unwrap();
        let deadline_ns = core.now_ns() + 10_000_000_000;
        while namespace.failure().is_none() {
            assert!(core.now_ns() < deadline_ns, "the host is still connected");
            namespace.poll(&mut Vec::new());
            core.sleep_ns(1_000_000).await;
        }
    });
}

#[test]
fn a_secret_is_not_printed_with_what_has_it() {
    let options = options_of(Some(keys(0x41, Some(0x42))), quick());
    let printed = format!("{options:?} {:?}", AuthMessageKind::Reply);
    assert!(!printed.contains("65, 65") && !printed.contains("AAAA"), "{printed}");
}
