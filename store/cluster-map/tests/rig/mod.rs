//! Servers of etcd, real ones.
#![allow(dead_code)]

pub(crate) mod certificates;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use certificates::{Ca, Identity};
use cluster_map::{ClusterMap, EtcdMap};
use serde_json::{Value, json};

/// A cluster of etcd, ended on drop.
pub(crate) struct EtcdCluster {
    directory: PathBuf,
    /// Client and peer address of each server.
    addresses: Vec<[SocketAddr; 2]>,
    servers: Vec<Option<Child>>,
    /// More arguments of each server.
    arguments: Vec<String>,
    /// Of a server with TLS: another address, which serves without.
    plain: Option<SocketAddr>,
}

impl EtcdCluster {
    /// Starts servers on loopback; `None`, with a line that says so, where etcd is not installed.
    pub(crate) fn start(name: &str, servers: usize) -> Option<EtcdCluster> {
        EtcdCluster::start_with(name, servers, &[])
    }

    /// The same with more arguments.
    pub(crate) fn start_with(name: &str, servers: usize, arguments: &[&str]) -> Option<EtcdCluster> {
        let listeners: Vec<_> = (0..2 * servers).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let addresses: Vec<SocketAddr> = listeners.iter().map(|it| it.local_addr().unwrap()).collect();
        drop(listeners);
        let addresses = addresses.chunks(2).map(|pair| [pair[0], pair[1]]).collect();
        let mut cluster = EtcdCluster::with_addresses(name, addresses)?;
        cluster.arguments = arguments.iter().map(ToString::to_string).collect();
        (0..servers).for_each(|server| cluster.start_server(server));
        cluster.wait_until_served();
        Some(cluster)
    }

    /// One server, whose clients use TLS. It has this certificate, and takes those of this CA's clients only if there is one.
    pub(crate) fn start_with_tls(
        name: &str,
        identity: &Identity,
        clients: Option<&Ca>,
        arguments: &[&str],
    ) -> Option<EtcdCluster> {
        let listeners = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let [client, peer, plain] = listeners.map(|listener| listener.local_addr().unwrap());
        let mut cluster = EtcdCluster::with_addresses(name, vec![[client, peer]])?;
        cluster.plain = Some(plain);
        cluster.arguments = arguments.iter().map(ToString::to_string).collect();
        cluster.set_identity(identity);
        for (option, file) in [("--cert-file", "server.pem"), ("--key-file", "server-key.pem")] {
            cluster
                .arguments
                .extend([option.to_string(), cluster.directory.join(file).display().to_string()]);
        }
        if let Some(clients) = clients {
            let ca = cluster.file("clients.pem", &clients.pem());
            let ca = ca.display().to_string();
            cluster.arguments.extend(["--client-cert-auth".to_string(), "--trusted-ca-file".to_string(), ca]);
        }
        cluster.start_server(0);
        cluster.wait_until_served();
        Some(cluster)
    }

    /// Replaces the certificate of a server with TLS, for connections that begin later.
    pub(crate) fn set_identity(&self, identity: &Identity) {
        self.file("server-key.pem", &identity.key);
        self.file("server.pem", &identity.certificate);
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
        Some(EtcdCluster { directory, addresses, servers, arguments: Vec::new(), plain: None })
    }

    pub(crate) fn start_server(&mut self, server: usize) {
        let name = |server: usize| format!("server{server}");
        let [client, peer] = self.addresses[server].map(|address| format!("http://{address}"));
        let client = match self.plain {
            Some(plain) => format!("https://{},http://{plain}", self.addresses[server][0]),
            None => client,
        };
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
            .args(&self.arguments)
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

    /// Saves what the only server has, with etcd's own tool.
    pub(crate) fn save_snapshot(&self) {
        let file = self.directory.join("snapshot");
        let endpoint = format!("http://{}", self.addresses[0][0]);
        let saved = Command::new("etcdctl")
            .env("ETCDCTL_API", "3")
            .args(["--endpoints", &endpoint, "snapshot", "save"])
            .arg(file)
            .output()
            .unwrap();
        assert!(saved.status.success(), "{}", String::from_utf8_lossy(&saved.stderr));
    }

    /// The only server is lost, and another one with what was saved is in its place.
    pub(crate) fn restore_snapshot(&mut self) {
        self.kill_server(0);
        let data = self.directory.join("server0");
        std::fs::remove_dir_all(&data).unwrap();
        let peer = format!("http://{}", self.addresses[0][1]);
        let restored = Command::new("etcdctl")
            .env("ETCDCTL_API", "3")
            .args(["snapshot", "restore"])
            .arg(self.directory.join("snapshot"))
            .args(["--name", "server0", "--initial-cluster", &format!("server0={peer}")])
            .args(["--initial-advertise-peer-urls", &peer, "--data-dir"])
            .arg(data)
            .output()
            .unwrap();
        assert!(restored.status.success(), "{}", String::from_utf8_lossy(&restored.stderr));
        self.start_server(0);
        self.wait_until_served();
    }

    pub(crate) fn pid(&self, server: usize) -> u32 {
        self.servers[server].as_ref().unwrap().id()
    }

    /// The URLs of all servers, with a prefix.
    pub(crate) fn urls(&self, prefix: &str) -> String {
        let scheme = if self.plain.is_some() { "https" } else { "http" };
        let url = |[client, _]: &[SocketAddr; 2]| format!("{scheme}://{client}/{prefix}");
        self.addresses.iter().map(url).collect::<Vec<_>>().join(",")
    }

    /// Waits until a request is answered, if only by what users without a name may not do.
    pub(crate) fn wait_until_served(&self) {
        let urls = self.plain.map_or_else(|| self.urls(""), |plain| format!("http://{plain}"));
        let map = EtcdMap::new(&urls).unwrap();
        let started = Instant::now();
        while let Err(error) = map.pools() {
            // The second is what etcd 3.7 says at times after a restart.
            let error = error.to_string();
            if ["user name is empty", "permission denied"].iter().any(|refusal| error.contains(refusal)) {
                return;
            }
            assert!(started.elapsed() < Duration::from_secs(60), "etcd does not serve: {error}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The answer to a request of the JSON gateway, which the root user makes if there is a token.
    pub(crate) fn request(&self, path: &str, token: Option<&str>, body: &Value) -> Value {
        let (body, address) = (body.to_string(), self.plain.unwrap_or(self.addresses[0][0]));
        let authorization = token.map(|token| format!("Authorization: {token}\r\n")).unwrap_or_default();
        let mut stream = TcpStream::connect(address).unwrap();
        let head = format!("POST {path} HTTP/1.0\r\n{authorization}Content-Length: {}\r\n\r\n", body.len());
        stream.write_all([head, body].concat().as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(" 200 "), "{path}: {answer}");
        serde_json::from_str(body).unwrap()
    }

    /// The token of the root user that [`enable_users`](Self::enable_users) makes.
    pub(crate) fn root_token(&self) -> String {
        let user = json!({ "name": "root", "password": "root" });
        self.request("/v3/auth/authenticate", None, &user)["token"].as_str().unwrap().to_string()
    }

    /// Makes the user `ringbolt`, which may use the keys with one prefix only, and requires users from now on.
    pub(crate) fn enable_users(&self, password: &str, prefix: &str) {
        let request = |path: &str, body: Value| _ = self.request(path, None, &body);
        for (user, password) in [("root", "root"), ("ringbolt", password)] {
            request("/v3/auth/user/add", json!({ "name": user, "password": password }));
            request("/v3/auth/role/add", json!({ "name": user }));
            request("/v3/auth/user/grant", json!({ "user": user, "role": user }));
        }
        self.grant(prefix, None);
        request("/v3/auth/enable", json!({}));
    }

    /// The user `ringbolt` may use the keys with this prefix too.
    pub(crate) fn grant(&self, prefix: &str, token: Option<&str>) {
        let end = format!("{}0", prefix.strip_suffix('/').unwrap());
        let permission = json!({ "permType": "READWRITE", "key": STANDARD.encode(prefix), "range_end": STANDARD.encode(end) });
        self.request("/v3/auth/role/grant", token, &json!({ "name": "ringbolt", "perm": permission }));
    }

    /// Makes a user, with the same word as its password, that may read all keys with one prefix, and write those with some others.
    pub(crate) fn add_user(&self, user: &str, reads: &str, writes: &[&str]) {
        let token = self.root_token();
        let request = |path: &str, body: Value| _ = self.request(path, Some(&token), &body);
        request("/v3/auth/user/add", json!({ "name": user, "password": user }));
        request("/v3/auth/role/add", json!({ "name": user }));
        request("/v3/auth/user/grant", json!({ "user": user, "role": user }));
        for (right, prefix) in [("READ", reads)].into_iter().chain(writes.iter().map(|it| ("READWRITE", *it)))
        {
            let end = format!("{}0", prefix.strip_suffix('/').unwrap());
            let permission = json!({ "permType": right, "key": STANDARD.encode(prefix), "range_end": STANDARD.encode(end) });
            request("/v3/auth/role/grant", json!({ "name": user, "perm": permission }));
        }
    }

    /// Writes a file that its owner alone can read.
    pub(crate) fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.directory.join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        path
    }
}

impl Drop for EtcdCluster {
    fn drop(&mut self) {
        (0..self.servers.len()).for_each(|server| self.kill_server(server));
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
