//! Servers of etcd, real ones.
#![allow(dead_code)]

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cluster_map::{ClusterMap, EtcdMap};

/// A cluster of etcd, ended on drop.
pub(crate) struct EtcdCluster {
    directory: PathBuf,
    /// Client and peer address of each server.
    addresses: Vec<[SocketAddr; 2]>,
    servers: Vec<Option<Child>>,
}

impl EtcdCluster {
    /// Starts servers on loopback; `None`, with a line that says so, where etcd is not installed.
    pub(crate) fn start(name: &str, servers: usize) -> Option<EtcdCluster> {
        let listeners: Vec<_> = (0..2 * servers).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let addresses: Vec<SocketAddr> = listeners.iter().map(|it| it.local_addr().unwrap()).collect();
        drop(listeners);
        let addresses = addresses.chunks(2).map(|pair| [pair[0], pair[1]]).collect();
        let mut cluster = EtcdCluster::with_addresses(name, addresses)?;
        (0..servers).for_each(|server| cluster.start_server(server));
        cluster.wait_until_served();
        Some(cluster)
    }

    /// A cluster whose servers are to be started, with the client and the peer address of each; `None`, with a line
    /// that says so, where etcd is not installed.
    pub(crate) fn with_addresses(name: &str, addresses: Vec<[SocketAddr; 2]>) -> Option<EtcdCluster> {
        if Command::new("etcd").arg("--version").output().is_err() {
            println!("SKIPPED: etcd is not installed: apt install etcd-server");
            return None;
        }
        let directory = std::env::temp_dir().join(format!("ringbolt-etcd-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir(&directory).unwrap();
        let servers = addresses.iter().map(|_| None).collect();
        Some(EtcdCluster { directory, addresses, servers })
    }

    pub(crate) fn start_server(&mut self, server: usize) {
        let name = |server: usize| format!("server{server}");
        let [client, peer] = self.addresses[server].map(|address| format!("http://{address}"));
        let members: Vec<String> = self
            .addresses
            .iter()
            .enumerate()
            .map(|(it, [_, peer])| format!("{}=http://{peer}", name(it)))
            .collect();
        let log = std::fs::File::create(self.directory.join(format!("{}.log", name(server)))).unwrap();
        let child = Command::new("etcd")
            .args(["--name", &name(server), "--initial-cluster", &members.join(",")])
            .arg("--data-dir")
            .arg(self.directory.join(name(server)))
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        self.servers[server] = Some(child);
    }

    /// Kills a server as a failure of its machine would.
    pub(crate) fn kill_server(&mut self, server: usize) {
        if let Some(mut child) = self.servers[server].take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    pub(crate) fn pid(&self, server: usize) -> u32 {
        self.servers[server].as_ref().unwrap().id()
    }

    /// The URLs of all servers, with a prefix.
    pub(crate) fn urls(&self, prefix: &str) -> String {
        let url = |[client, _]: &[SocketAddr; 2]| format!("http://{client}/{prefix}");
        self.addresses.iter().map(url).collect::<Vec<_>>().join(",")
    }

    /// Waits until a request is answered.
    pub(crate) fn wait_until_served(&self) {
        let map = EtcdMap::new(&self.urls("")).unwrap();
        let started = Instant::now();
        while let Err(error) = map.pools() {
            assert!(started.elapsed() < Duration::from_secs(60), "etcd does not serve: {error}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for EtcdCluster {
    fn drop(&mut self) {
        (0..self.servers.len()).for_each(|server| self.kill_server(server));
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
