//! A target whose hosts have keys, in files of a keyring.
#![allow(dead_code)]

use std::path::PathBuf;

use bdev::Registry;
use bdev::malloc::{self, MallocConfig};
use control::{Key, Keyring};
use nvme_auth::{AuthHash, AuthKey, AuthKeys};
use nvmf::{HostKeys, ListenAddress, NamespaceConfig, NvmfTarget, SubsystemConfig, TcpTransportConfig};
use reactor::{Core, IdlePolicy, Reactor, ReactorConfig, Reactors};
use secret::Secret;

pub(crate) struct Rig {
    pub(crate) target: NvmfTarget,
    /// The port with TLS, and one without.
    pub(crate) secure: String,
    pub(crate) plain: String,
    pub(crate) keyring: Keyring,
    pub(crate) directory: PathBuf,
    reactors: Option<Reactors>,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.target.shutdown();
        drop(self.reactors.take());
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

impl Rig {
    /// A target on these reactors. Each subsystem has a namespace of 2 MiB and no hosts.
    pub(crate) fn start(
        test: &str,
        config: &ReactorConfig,
        transport: TcpTransportConfig,
        subsystems: &[&str],
    ) -> Rig {
        let registry = Registry::new();
        let reactors = Reactors::start(config).unwrap();
        let target = NvmfTarget::new(registry.clone(), reactors.handles());
        target.create_transport(transport).unwrap();
        let any = || ListenAddress::tcp("127.0.0.1", "0");
        let (mut secure, mut plain) = (any(), any());
        for (number, nqn) in subsystems.iter().enumerate() {
            let name = format!("Malloc{number}");
            malloc::create(&registry, MallocConfig::new(&name, 4096, 512)).unwrap();
            target.create_subsystem(nqn, SubsystemConfig::default()).unwrap();
            target.add_namespace(nqn, NamespaceConfig::new(&name)).unwrap();
            secure = target.add_secure_listener(nqn, secure).unwrap();
            plain = target.add_listener(nqn, plain).unwrap();
        }
        let directory = std::env::temp_dir().join(format!("nvmf-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let (secure, plain) = (secure.trsvcid, plain.trsvcid);
        Rig { target, secure, plain, keyring: Keyring::default(), directory, reactors: Some(reactors) }
    }

    /// A key of the keyring, from a file.
    pub(crate) fn add_key(&self, text: &Secret) -> Key {
        let name = format!("key{}", self.keyring.describe().len());
        let path = self.directory.join(&name);
        text.write_new(&path).unwrap();
        self.keyring.add_file(&name, &path).unwrap();
        self.keyring.key(&name).unwrap()
    }

    /// These keys as the target has them.
    pub(crate) fn host_keys(&self, keys: &AuthKeys) -> HostKeys {
        let of = |key: &AuthKey| (self.add_key(&key.to_text()), key.clone());
        HostKeys { host: of(&keys.host), controller: keys.controller.as_ref().map(of) }
    }
}

/// Keys of these bytes, for SHA-256.
pub(crate) fn keys(host: u8, controller: Option<u8>) -> AuthKeys {
    let key = |byte| AuthKey::new(Some(AuthHash::Sha256), &[byte; 32]).unwrap();
    AuthKeys { host: key(host), controller: controller.map(key) }
}

pub(crate) fn on_host<R: 'static, F: Future<Output = R> + 'static>(job: impl FnOnce(Core) -> F) -> R {
    let reactor =
        Reactor::new(&ReactorConfig { idle: IdlePolicy::Sleep, ..ReactorConfig::default() }).unwrap();
    let core = reactor.core();
    reactor.block_on(job(core))
}
