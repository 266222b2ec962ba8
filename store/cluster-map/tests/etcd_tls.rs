//! The map in etcd with TLS: a real one, and servers that fail in every way during and after the handshake.
#![allow(clippy::unwrap_used)]

mod records;
mod rig;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cluster_map::*;
use records::record;
use rig::EtcdCluster;
use rig::certificates::{Ca, Identity};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

const LOOPBACK: &[&str] = &["127.0.0.1", "localhost"];

/// Files of a client, in a directory that is removed on drop.
struct Client {
    directory: PathBuf,
}

impl Client {
    fn new(name: &str) -> Client {
        let directory = std::env::temp_dir().join(format!("ringbolt-tls-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir(&directory).unwrap();
        Client { directory }
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path = self.directory.join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        path
    }

    fn trusts(&self, ca: &Ca) -> EtcdFiles {
        EtcdFiles { ca: Some(self.file("ca.pem", &ca.pem())), ..Default::default() }
    }

    fn trusts_as(&self, ca: &Ca, identity: &Identity) -> EtcdFiles {
        EtcdFiles {
            certificate: Some(self.file("cert.pem", &identity.certificate)),
            key: Some(self.file("key.pem", &identity.key)),
            ..self.trusts(ca)
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn refused(urls: &str, files: &EtcdFiles, reason: &str) {
    let map = EtcdMap::with_files(urls, files).unwrap();
    let is_refused = |error: MapError| {
        let error = error.to_string();
        assert!(error.contains(reason) && error.contains("in etcd at 127.0.0.1:"), "{reason}: {error}");
    };
    is_refused(map.pools().unwrap_err());
    is_refused(map.changes().wait(Duration::from_secs(5)).unwrap_err());
}

#[test]
fn a_map_is_used_through_tls_while_certificates_are_replaced() {
    let (old, new, client) = (Ca::new("old"), Ca::new("new"), Client::new("replaced"));
    let Some(mut etcd) = EtcdCluster::start_with_tls("tls", &old.server(LOOPBACK, 2100), None, &[]) else {
        return;
    };
    let map = EtcdMap::with_files(&etcd.urls("c"), &client.trusts(&old)).unwrap();
    map.create().unwrap();
    let mut changes = map.changes();
    assert_eq!(changes.wait(Duration::from_secs(30)).unwrap(), [MapChange::Everything]);
    let first = record(1, 1, &[1, 2, 3]);
    map.propose_group(GroupId(7), &first).unwrap();
    assert_eq!(changes.wait(Duration::from_secs(30)).unwrap(), [MapChange::Group(GroupId(7), first)]);
    // More than one record of TLS, both ways.
    let many: Vec<_> = (100..1100).map(|group| (GroupId(group), record(1, 1, &[1, 2, 3]))).collect();
    assert_eq!(map.propose_groups(&many).unwrap(), vec![Proposed::Accepted; 1000]);
    assert_eq!(map.groups(100..1100).unwrap().len(), 1000);

    // Connections that begin now have the new certificate.
    etcd.set_identity(&new.server(LOOPBACK, 2100));
    etcd.kill_server(0);
    etcd.start_server(0);
    etcd.wait_until_served();
    let error = map.cluster().unwrap_err().to_string();
    assert!(error.contains("its certificate is not of the CA in --etcd-ca-file"), "{error}");
    client.file("ca.pem", &[old.pem(), new.pem()].concat());
    let second = record(2, 2, &[2, 3]);
    map.propose_group(GroupId(7), &second).unwrap();
    let started = Instant::now();
    while !changes
        .wait(Duration::from_secs(1))
        .is_ok_and(|found| found.iter().any(|change| *change == MapChange::Group(GroupId(7), second.clone())))
    {
        assert!(started.elapsed() < Duration::from_secs(60), "the watch does not continue");
    }
}

#[test]
fn a_server_that_is_not_etcd_s_is_refused_by_name() {
    let (ca, other, client) = (Ca::new("ca"), Ca::new("other"), Client::new("refused"));
    let Some(etcd) = EtcdCluster::start_with_tls("refused", &ca.server(LOOPBACK, 2100), None, &[]) else {
        return;
    };
    refused(&etcd.urls("c"), &client.trusts(&other), "its certificate is not of the CA in --etcd-ca-file");
    let files = client.trusts(&ca);
    etcd.set_identity(&ca.server(&["10.0.0.1", "etcd.example"], 2100));
    refused(&etcd.urls("c"), &files, "its certificate is for another host");
    etcd.set_identity(&ca.server(LOOPBACK, 2021));
    refused(&etcd.urls("c"), &files, "its certificate has expired");
    etcd.set_identity(&ca.client("127.0.0.1"));
    refused(&etcd.urls("c"), &files, "its certificate is");
    etcd.set_identity(&ca.server(LOOPBACK, 2100));
    let map = EtcdMap::with_files(&etcd.urls("c").replace("127.0.0.1", "localhost"), &files).unwrap();
    map.create().unwrap();
}

#[test]
fn a_client_certificate_is_shown_where_etcd_requires_one() {
    let (ca, clients, client) = (Ca::new("ca"), Ca::new("clients"), Client::new("client"));
    // Those of the gateway are of the server's.
    let server = clients.server(LOOPBACK, 2100);
    let Some(etcd) = EtcdCluster::start_with_tls("client", &server, Some(&clients), &[]) else { return };
    refused(&etcd.urls("c"), &client.trusts(&clients), "it requires a client certificate");
    let wrong = client.trusts_as(&clients, &ca.client("ringbolt"));
    refused(&etcd.urls("c"), &wrong, "it refuses the certificate of --etcd-cert-file");
    let named = client.trusts_as(&clients, &clients.client("ringbolt"));
    let map = EtcdMap::with_files(&etcd.urls("c"), &named).unwrap();
    map.create().unwrap();
    assert_eq!(map.changes().wait(Duration::from_secs(30)).unwrap(), [MapChange::Everything]);

    // With users, the gateway takes no certificate with a name, because it cannot be the user. So that is another file.
    let user = Some(client.file("user", "ringbolt:secret"));
    let nameless = client.trusts_as(&clients, &clients.client(""));
    let with_user = EtcdFiles { user, ..nameless.clone() };
    let map = EtcdMap::with_files(&etcd.urls("c"), &with_user).unwrap();
    map.cluster().unwrap();
    etcd.enable_users("secret", "/c/");
    map.cluster().unwrap();
    refused(&etcd.urls("c"), &nameless, "--etcd-user-file names it");
    client.trusts_as(&clients, &clients.client("ringbolt"));
    refused(&etcd.urls("c"), &with_user, "only client certificates without a CommonName");
}

#[test]
fn files_that_are_missing_or_damaged_are_errors_with_their_names() {
    let (ca, client) = (Ca::new("ca"), Client::new("files"));
    let url = "https://127.0.0.1:1";
    let invalid = |files: EtcdFiles, reason: &str| {
        let error = EtcdMap::with_files(url, &files).err().unwrap().to_string();
        assert!(error.contains(reason), "{error}");
    };
    let full = client.trusts_as(&ca, &ca.client("ringbolt"));
    invalid(EtcdFiles::default(), "--etcd-ca-file names it");
    invalid(EtcdFiles { key: None, ..full.clone() }, "--etcd-key-file names it");
    invalid(EtcdFiles { certificate: None, ..full.clone() }, "--etcd-cert-file names it");

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    let damaged = |name: &str, text: &str, reason: &str| {
        let before = std::fs::read_to_string(client.directory.join(name)).unwrap();
        let path = client.file(name, text);
        let error = EtcdMap::with_files(&url, &full).unwrap().pools().unwrap_err().to_string();
        assert!(error.contains(reason) && error.contains(path.to_str().unwrap()), "{reason}: {error}");
        assert!(name != "key.pem" || error.ends_with(reason) || !text.contains("S3CRET"), "{error}");
        client.file(name, &before);
    };
    for name in ["ca.pem", "cert.pem"] {
        for text in ["", "nonsense", "-----BEGIN CERTIFICATE-----\n????\n-----END CERTIFICATE-----\n"] {
            damaged(name, text, "no certificates in PEM, or a damaged one");
        }
    }
    let nothing = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    damaged("ca.pem", nothing, "a certificate of it cannot be used");
    damaged("ca.pem", &"x".repeat((1 << 20) + 1), "more than 1048576 bytes");
    let key = "-----BEGIN PRIVATE KEY-----\n";
    damaged("key.pem", "", "key.pem: it is empty");
    for text in ["S3CRET", &format!("{key}S3CRET\n-----BEGIN S3CRET"), &format!("{key}S3CRET!\n")] {
        // And nothing of what was found.
        damaged("key.pem", text, "key.pem: it has no private key in PEM, without a passphrase");
    }
    damaged("key.pem", &ca.client("other").key, "it is not the key of the certificate in");
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(full.key.as_ref().unwrap(), std::fs::Permissions::from_mode(0o644)).unwrap();
    let error = EtcdMap::with_files(&url, &full).unwrap().pools().unwrap_err().to_string();
    assert!(error.contains("mode 644: chmod 600"), "{error}");
}

/// A server that does something with each connection.
fn server(act: impl Fn(&mut TcpStream) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || listener.incoming().for_each(|stream| act(&mut stream.unwrap())));
    url
}

#[test]
fn servers_that_send_nonsense_or_nothing_end_in_bounded_time_and_memory() {
    let (ca, client) = (Ca::new("ca"), Client::new("nonsense"));
    let files = client.trusts(&ca);
    let header = |kind: u8, length: u16| [&[kind, 3, 3][..], &length.to_be_bytes()].concat();
    let read_hello = |stream: &mut TcpStream| _ = stream.read(&mut [0; 4096]);
    let write_for_ever = |stream: &mut TcpStream, bytes: &[u8]| while stream.write_all(bytes).is_ok() {};
    let plain = server(move |stream| {
        read_hello(stream);
        let _ = stream.write_all(b"HTTP/1.0 400 Bad Request\r\n\r\n");
    });
    let closing = server(move |stream| read_hello(stream));
    // A handshake message of 16 MiB, in records without end.
    let endless = [header(22, 16384), vec![2, 255, 255, 255], vec![0; 16380]].concat();
    let endless = server(move |stream| write_for_ever(stream, &endless));
    // Messages that TLS 1.3 ignores (RFC 8446, D.4).
    let ignored = [header(20, 1), vec![1]].concat();
    let ignored = server(move |stream| write_for_ever(stream, &ignored));
    let empty = server(move |stream| write_for_ever(stream, &header(22, 0)));
    let silent = server(|stream| _ = stream.read_to_end(&mut Vec::new()));
    let slow = server(move |stream| {
        read_hello(stream);
        for byte in [header(22, 200), vec![2; 200]].concat() {
            if stream.write_all(&[byte]).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    for (url, reason) in [
        (plain, "it does not speak TLS: its URL may be http://"),
        (closing, "it closed the connection during the handshake"),
        (endless, ""),
        (ignored, ""),
        (empty, ""),
        (silent, "the handshake takes too long"),
        (slow, "the handshake takes too long"),
    ] {
        let started = Instant::now();
        refused(&url, &files, reason);
        assert!(started.elapsed() < Duration::from_secs(20), "{reason}");
    }
    assert!(peak_memory() < 256 << 20);
}

/// Most bytes that this process ever had (proc_pid_status(5), `VmHWM`).
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// Between a client and etcd: ends the connection, without TLS's end, after so many bytes of etcd's.
fn cut_after(address: &str, bytes: u64) -> String {
    let address = address.to_string();
    server(move |client| {
        let etcd = TcpStream::connect(&address).unwrap();
        let (mut from, mut to) = (client.try_clone().unwrap(), etcd.try_clone().unwrap());
        let requests = std::thread::spawn(move || _ = std::io::copy(&mut from, &mut to));
        let answer = etcd.try_clone().unwrap();
        let _ = std::io::copy(&mut answer.take(bytes), client);
        let _ = client.shutdown(std::net::Shutdown::Both);
        let _ = etcd.shutdown(std::net::Shutdown::Both);
        requests.join().unwrap();
    })
}

#[test]
fn a_connection_that_is_cut_anywhere_is_an_error_and_never_half_an_answer() {
    let (ca, client) = (Ca::new("ca"), Client::new("cut"));
    let Some(etcd) = EtcdCluster::start_with_tls("cut", &ca.server(LOOPBACK, 2100), None, &[]) else {
        return;
    };
    let files = client.trusts(&ca);
    let map = EtcdMap::with_files(&etcd.urls(""), &files).unwrap();
    let many: Vec<_> = (0..100).map(|group| (GroupId(group), record(1, 1, &[1, 2, 3]))).collect();
    map.propose_groups(&many).unwrap();
    let address = etcd.urls("").replace("https://", "").replace('/', "");
    let mut outcomes = [0; 2];
    for bytes in (0..30_000).step_by(1500) {
        let map = EtcdMap::with_files(&cut_after(&address, bytes), &files).unwrap();
        match map.groups(0..100) {
            Ok(groups) => {
                assert_eq!(groups.len(), 100, "{bytes}");
                outcomes[1] += 1;
            }
            Err(error) => {
                let error = error.to_string();
                let is_known = ["closed the connection", "reset by peer", "Broken pipe"];
                assert!(is_known.iter().any(|known| error.contains(known)), "{bytes}: {error}");
                outcomes[0] += 1;
            }
        }
    }
    assert!(outcomes.iter().all(|count| *count > 0), "{outcomes:?}");
}

#[test]
fn an_answer_that_ends_with_the_connection_is_whole_only_with_the_end_of_tls() {
    let (ca, client) = (Ca::new("ca"), Client::new("end"));
    let (identity, files) = (ca.server(LOOPBACK, 2100), client.trusts(&ca));
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let chain = CertificateDer::from_pem_slice(identity.certificate.as_bytes()).unwrap();
        let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes()).unwrap();
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[version])
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![chain], key)
            .unwrap();
        let config = Arc::new(config);
        for is_ended in [true, false] {
            let config = config.clone();
            let url = server(move |stream| {
                let mut tls = rustls::ServerConnection::new(config.clone()).unwrap();
                let mut both = rustls::Stream::new(&mut tls, stream);
                let _ = both.read(&mut [0; 4096]);
                let _ = both.write_all(b"HTTP/1.0 200 OK\r\n\r\n{\"kvs\":[]}");
                if is_ended {
                    tls.send_close_notify();
                    let _ = tls.write_tls(stream);
                }
            });
            let found = EtcdMap::with_files(&url, &files).unwrap().pools();
            match is_ended {
                true => assert!(found.unwrap().is_empty(), "{version:?}"),
                false => {
                    let error = found.unwrap_err().to_string();
                    assert!(error.contains("before the end of its answer"), "{version:?}: {error}");
                }
            }
        }
    }
}

#[test]
fn a_directory_has_copies_of_the_files_for_its_owner_alone() {
    use std::os::unix::fs::PermissionsExt;
    let (ca, client) = (Ca::new("ca"), Client::new("directory"));
    let files =
        EtcdFiles { user: Some(client.file("user", "a:b")), ..client.trusts_as(&ca, &ca.client("ringbolt")) };
    let cluster = client.directory.join("cluster");
    std::fs::create_dir(&cluster).unwrap();
    let urls = "https://etcd:1/c".to_string();
    let options = EtcdOptions { urls: Some(urls.clone()), files: files.clone() };
    let found = |options: &EtcdOptions| MapLocation::find(&cluster, options).unwrap();
    let location = found(&options).unwrap();
    assert_eq!(location, MapLocation::Etcd { urls: urls.clone(), files });
    location.save(&cluster).unwrap();

    let Some(MapLocation::Etcd { urls: known, files: copies }) = found(&EtcdOptions::default()) else {
        panic!("the directory has no location")
    };
    assert_eq!(known, urls);
    let all = [&copies.user, &copies.ca, &copies.certificate, &copies.key];
    let names = ["etcd-user", "etcd-ca.pem", "etcd-cert.pem", "etcd-key.pem"];
    let originals = ["user", "ca.pem", "cert.pem", "key.pem"];
    for ((path, name), original) in all.into_iter().zip(names).zip(originals) {
        let path = path.as_ref().unwrap();
        assert_eq!(*path, cluster.join(name));
        assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
        let original = client.directory.join(original);
        assert_eq!(std::fs::read(path).unwrap(), std::fs::read(original).unwrap());
    }
    // Those that are named replace them, and the others stay.
    let user = client.file("user2", "c:d");
    let other = EtcdOptions { urls: None, files: EtcdFiles { user: Some(user), ..Default::default() } };
    found(&other).unwrap().save(&cluster).unwrap();
    assert_eq!(std::fs::read_to_string(cluster.join("etcd-user")).unwrap(), "c:d");
    assert_eq!(std::fs::read_dir(&cluster).unwrap().count(), 5);
    // A file that others can read is not copied.
    let open = client.file("user3", "e:f");
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o644)).unwrap();
    let other = EtcdOptions { urls: None, files: EtcdFiles { user: Some(open), ..Default::default() } };
    assert!(found(&other).unwrap().save(&cluster).unwrap_err().to_string().contains("chmod 600"));
    assert_eq!(std::fs::read_to_string(cluster.join("etcd-user")).unwrap(), "c:d");

    // Nor is one named in vain.
    let in_vain = |directory: &str, urls: Option<&str>, files: &EtcdFiles| {
        let options = EtcdOptions { urls: urls.map(str::to_string), files: files.clone() };
        let directory = client.directory.join(directory);
        MapLocation::find(&directory, &options).err().map(|error| error.to_string())
    };
    let user = EtcdFiles { user: copies.user.clone(), ..Default::default() };
    let ca = EtcdFiles { ca: copies.ca.clone(), ..user.clone() };
    assert_eq!(in_vain("new", None, &user).unwrap(), "etcd_user_file has no effect without URLs of etcd");
    assert_eq!(in_vain("new", Some("http://etcd"), &user), None);
    let plain = "etcd_ca_file has no effect with URLs that are not https://";
    assert_eq!(in_vain("new", Some("http://etcd"), &ca).unwrap(), plain);
    assert_eq!(in_vain("new", Some("https://etcd"), &ca), None);
    assert_eq!(in_vain("cluster", None, &ca), None);
    // The files of the directory wait for such URLs.
    assert_eq!(in_vain("cluster", Some("http://etcd"), &EtcdFiles::default()), None);

    // What is saved in a configuration is what was given.
    let parameters: Vec<_> = options.parameters().collect();
    let expected = ["etcd", "etcd_user_file", "etcd_ca_file", "etcd_cert_file", "etcd_key_file"];
    assert_eq!(parameters.iter().map(|(name, _)| *name).collect::<Vec<_>>(), expected);
    let mut again = EtcdOptions::default();
    assert!(parameters.iter().all(|(name, value)| again.set_parameter(name, value)));
    assert!(!again.set_parameter("etcd_file", "x"));
    assert_eq!(again, options);
}
