//! New keys of a host that is connected.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bdev_nvme::{Attach, PathStatus};
use control::Keyring;
use nvme::HostCredentials;
use nvme_auth::{AuthHash, AuthKey, AuthKeys, AuthOptions, DhGroup};
use nvmf::{HostKeys, NvmfTarget};

use crate::sides::{HostSide, NQN, TargetSide, medium, wait_for};

const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555";

/// Commands of an exchange in which only the host proves its key: Send, Receive, Send and Receive.
const EXCHANGE: u64 = 4;

fn flag() -> Arc<AtomicBool> {
    Arc::default()
}

fn key(byte: u8) -> AuthKey {
    AuthKey::new(Some(AuthHash::Sha256), &[byte; 32]).unwrap()
}

fn keys(byte: u8) -> Option<AuthKeys> {
    Some(AuthKeys { host: key(byte), controller: None })
}

/// The same key as the target has it: of a file in the keyring.
fn host_keys(keyring: &Keyring, byte: u8) -> HostKeys {
    let name = format!("key{byte}");
    let file = std::env::temp_dir().join(format!("bdev-nvme-keys-{byte}-{}", std::process::id()));
    let _ = std::fs::remove_file(&file);
    key(byte).to_text().write_new(&file).unwrap();
    keyring.add_file(&name, &file).unwrap();
    let found = keyring.key(&name).unwrap();
    std::fs::remove_file(&file).unwrap();
    HostKeys { host: (found, key(byte)), controller: None }
}

/// Commands that the target has received on the admin queue, and on all I/O queues.
fn commands(target: &NvmfTarget) -> (u64, u64) {
    let qpairs = target.qpairs(NQN).unwrap();
    let of =
        |is_admin: bool| qpairs.iter().filter(|one| (one.qid == 0) == is_admin).map(|one| one.commands).sum();
    (of(true), of(false))
}

#[test]
fn a_connected_path_authenticates_with_new_keys_and_is_lost_if_they_are_wrong() {
    let (medium, keyring) = (medium(), Keyring::default());
    let side = TargetSide::start(&medium, &["0".into()]);
    side.target.allow_any_host(NQN, false).unwrap();
    side.target.add_host_with_keys(NQN, HOST, host_keys(&keyring, 1)).unwrap();
    let host = HostSide::start();
    let quick = AuthOptions { hashes: vec![AuthHash::Sha256], groups: vec![DhGroup::Null] };
    let credentials = HostCredentials::new(keys(1), quick);
    let mut path = HostSide::path(&side.ports()[0]);
    path.options.hostnqn = Some(HOST.parse().unwrap());
    path.options.authentication = Some(credentials.clone());
    host.initiator.attach(Attach::new("Nvme0", path)).unwrap();
    let (stop, is_idle, close) = (flag(), flag(), flag());
    let flushed = Arc::new(AtomicU64::new(0));
    let (ends, idle, closes, count) = (stop.clone(), is_idle.clone(), close.clone(), flushed.clone());
    let done = host.with_io(move |core, io| async move {
        while !ends.load(Ordering::Acquire) {
            io.flush().await?;
            count.fetch_add(1, Ordering::Release);
        }
        idle.store(true, Ordering::Release);
        while !closes.load(Ordering::Acquire) {
            core.sleep_ns(1_000_000).await;
        }
        io.flush().await
    });
    let wait_for_flushes = |more: u64| {
        let before = flushed.load(Ordering::Acquire);
        wait_for("flushes", || flushed.load(Ordering::Acquire) > before + more);
    };
    wait_for_flushes(1);
    let (admin, _) = commands(&side.target);
    side.target.set_host_keys(NQN, HOST, Some(host_keys(&keyring, 2))).unwrap();
    credentials.set_keys(keys(2));
    host.initiator.authenticate("Nvme0").unwrap();
    assert!(commands(&side.target).0 >= admin + EXCHANGE, "the admin queue");
    wait_for_flushes(500);
    stop.store(true, Ordering::Release);
    wait_for("the flushes to end", || is_idle.load(Ordering::Acquire));
    // Connect, and the exchange that follows it.
    let expected = flushed.load(Ordering::Acquire) + 1 + 2 * EXCHANGE;
    assert_eq!(commands(&side.target).1, expected, "the I/O queue");
    let status = || host.initiator.controllers()[0].paths[0].status;
    assert_eq!(status(), PathStatus::Enabled);

    credentials.set_keys(keys(3));
    host.initiator.authenticate("Nvme0").unwrap_err();
    wait_for("the path to be lost", || status() == PathStatus::Reconnecting);
    credentials.set_keys(keys(2));
    wait_for("the path to be connected", || status() == PathStatus::Enabled);
    close.store(true, Ordering::Release);
    done.recv_timeout(Duration::from_secs(30)).unwrap().unwrap();
}
