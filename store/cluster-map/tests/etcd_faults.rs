//! The map in etcd, against servers that fail in every way: a named error in bounded time, or the next endpoint.
#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cluster_map::*;

/// A server that answers each connection's requests in one way.
struct FakeEtcd {
    url: String,
    requests: Arc<AtomicUsize>,
}

impl FakeEtcd {
    fn start(answer: impl Fn(&mut TcpStream) + Send + Sync + 'static) -> FakeEtcd {
        FakeEtcd::answering(move |stream, _| answer(stream))
    }

    /// Answers each request by its body.
    fn answering(answer: impl Fn(&mut TcpStream, &str) + Send + Sync + 'static) -> FakeEtcd {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (requests, answer) = (Arc::new(AtomicUsize::new(0)), Arc::new(answer));
        let counted = requests.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, counted, answer) = (stream.unwrap(), counted.clone(), answer.clone());
                std::thread::spawn(move || {
                    while let Some(request) = read_request(&mut stream) {
                        counted.fetch_add(1, Ordering::SeqCst);
                        answer(&mut stream, &request);
                    }
                });
            }
        });
        FakeEtcd { url, requests }
    }

    /// Answers every request with these bytes, then closes the connection.
    fn bytes(answer: Vec<u8>) -> FakeEtcd {
        FakeEtcd::start(move |stream| {
            let _ = stream.write_all(&answer);
            let _ = stream.shutdown(std::net::Shutdown::Both);
        })
    }

    fn json(status: &str, body: &str) -> FakeEtcd {
        FakeEtcd::bytes(json_answer(status, body))
    }

    fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }
}

fn json_answer(status: &str, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// A request, head and body; `None` at the end of the connection.
fn read_request(stream: &mut TcpStream) -> Option<String> {
    let mut bytes = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let end = bytes.windows(4).position(|window| window == b"\r\n\r\n");
        if let Some(end) = end {
            let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
            let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: ")).unwrap();
            let body = end + 4;
            if bytes.len() >= body + length.parse::<usize>().unwrap() {
                return Some(String::from_utf8(bytes).unwrap());
            }
        }
        let count = stream.read(&mut piece).ok().filter(|count| *count > 0)?;
        bytes.extend_from_slice(&piece[..count]);
    }
}

/// An answer with a pool `p`.
const POOLS: &str = r#"{"header":{"revision":"7"},"kvs":[{"key":"L3Jpbmdib2x0L3Bvb2xzL3A=","mod_revision":"5","version":"1",
    "value":"eyJmaXJzdF9ncm91cCI6MCwiZ3JvdXBzIjo4LCJyZXBsaWNhcyI6MiwiaW5fc3luY19taW4iOjF9"}],"count":"1"}"#;

fn refusing_url() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

#[test]
fn each_fault_is_a_named_error_and_the_next_endpoint_is_asked() {
    let endless = [
        &b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"[..],
        &b"8\r\n{{{{{{{{\r\n".repeat(3 << 20),
    ];
    let not_base64 = POOLS.replace("L3Jpbmdib2x0L3Bvb2xzL3A=", "?");
    let cases = [
        (
            FakeEtcd::bytes(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"kvs\"".to_vec()),
            "before the end",
        ),
        (
            FakeEtcd::bytes(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\n{\"kv".to_vec()),
            "before the end",
        ),
        (FakeEtcd::bytes(b"SSH-2.0-OpenSSH_9.2\r\n".to_vec()), "no status of HTTP"),
        (FakeEtcd::bytes(Vec::new()), "before the end"),
        (FakeEtcd::json("200 OK", "{\"kvs\": 7}"), "malformed"),
        (FakeEtcd::json("200 OK", "<html>"), "malformed"),
        (FakeEtcd::json("200 OK", &not_base64), "malformed"),
        (FakeEtcd::json("503 Unavailable", r#"{"error":"no leader","code":14}"#), "status 503: no leader"),
        (FakeEtcd::json("404 Not Found", "404 page not found"), "status 404"),
        (FakeEtcd::bytes(endless.concat()), "more than 16777216 bytes"),
    ];
    for (fake, reason) in &cases {
        let error = EtcdMap::new(&fake.url).unwrap().pools().unwrap_err().to_string();
        assert!(
            error.contains(reason) && error.starts_with("the cluster map in etcd at 127.0.0.1:"),
            "{reason}: {error}"
        );
    }
    let error = EtcdMap::new(&refusing_url()).unwrap().pools().unwrap_err().to_string();
    assert!(error.contains("refused"), "{error}");

    // The one that answers is found, and asked from then on.
    let good = FakeEtcd::start(|stream| _ = stream.write_all(&json_answer("200 OK", POOLS)));
    let faulty: Vec<&str> = cases.iter().map(|(fake, _)| fake.url.as_str()).collect();
    let map = EtcdMap::new(&format!("{},{},{}", refusing_url(), faulty.join(","), good.url)).unwrap();
    let pool =
        PoolRecord { first_group: 0, groups: 8, replicas: 2, in_sync_min: 1, class: Default::default() };
    let before: Vec<usize> = cases.iter().map(|(fake, _)| fake.requests()).collect();
    for _ in 0..3 {
        assert_eq!(map.pools().unwrap(), [("p".to_string(), pool.clone())].into());
    }
    for ((fake, reason), before) in cases.iter().zip(before) {
        assert_eq!(fake.requests(), before + 1, "{reason}");
    }
    assert_eq!(good.requests(), 3);
}

#[test]
fn an_endpoint_that_is_silent_or_slow_ends_in_bounded_time() {
    let silent = FakeEtcd::start(|_| ());
    // A byte now and then makes no answer.
    let slow = FakeEtcd::start(|stream| {
        for byte in json_answer("200 OK", POOLS) {
            if stream.write_all(&[byte]).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    for fake in [&silent, &slow] {
        let started = Instant::now();
        let error = EtcdMap::new(&fake.url).unwrap().pools().unwrap_err().to_string();
        assert!(error.contains("did not answer within 2000 ms"), "{error}");
        assert!(started.elapsed() < Duration::from_secs(20));
    }
    // A watch of a silent endpoint ends too, so that another one is watched.
    let mut changes = EtcdMap::new(&silent.url).unwrap().changes();
    assert!(changes.wait(Duration::from_secs(1)).unwrap_err().to_string().contains("did not answer"));
}

#[test]
fn an_endpoint_that_is_silent_does_not_hold_up_others_for_long() {
    let silent = FakeEtcd::start(|_| ());
    let good = FakeEtcd::start(|stream| _ = stream.write_all(&json_answer("200 OK", POOLS)));
    let map = EtcdMap::new(&format!("{},{}", silent.url, good.url)).unwrap();
    let started = Instant::now();
    map.pools().unwrap();
    // The limit of an endpoint alone is 2 s.
    assert!(started.elapsed() < Duration::from_millis(1500), "{:?}", started.elapsed());
    assert_eq!((silent.requests(), good.requests()), (1, 1));
    // With all silent, each is asked again with more time, and an endpoint that failed is not.
    let map = EtcdMap::new(&format!("{},{},{}", silent.url, refusing_url(), silent.url)).unwrap();
    let error = map.pools().unwrap_err().to_string();
    assert!(error.contains("did not answer within 2000 ms"), "{error}");
    assert_eq!(silent.requests(), 1 + 2 * 3);
    // What may not be carried out twice is asked once, and has all the time.
    let error = map.set_out(NodeId(1), Some(OutReason::Operator)).unwrap_err().to_string();
    assert!(error.contains("did not answer within 2000 ms"), "{error}");
    assert_eq!(silent.requests(), 7 + 2);
}

#[test]
fn a_slow_etcd_is_asked_once_when_it_is_known_to_be_slow() {
    let slow = [(); 2].map(|()| {
        FakeEtcd::start(|stream| {
            std::thread::sleep(Duration::from_millis(600));
            let _ = stream.write_all(&json_answer("200 OK", POOLS));
        })
    });
    let map = EtcdMap::new(&format!("{},{}", slow[0].url, slow[1].url)).unwrap();
    let requests = || slow[0].requests() + slow[1].requests();
    map.pools().unwrap();
    assert_eq!(requests(), 5, "twice with little time, then once with all");
    for _ in 0..2 {
        map.pools().unwrap();
    }
    assert_eq!(requests(), 7);
}

#[test]
fn a_request_to_remove_a_pool_that_is_carried_out_late_removes_no_other_pool() {
    // The transaction fails, and the pool is another one from then on, or still the same.
    for (later, expected) in [
        (POOLS.replace("\"5\"", "\"9\""), Ok(())),
        (POOLS.into(), Err("pool p has images: remove them first")),
    ] {
        let has_failed = AtomicUsize::new(0);
        let fake = FakeEtcd::answering(move |stream, request| {
            let answer = match request.contains("/v3/kv/txn") {
                true => {
                    assert!(
                        request.contains(r#""target":"MOD""#) && request.contains(r#""mod_revision":"5""#)
                    );
                    has_failed.store(1, Ordering::SeqCst);
                    r#"{"succeeded":false}"#
                }
                false if has_failed.load(Ordering::SeqCst) == 1 => &later,
                false => POOLS,
            };
            let _ = stream.write_all(&json_answer("200 OK", answer));
        });
        let removed = EtcdMap::new(&fake.url).unwrap().remove_pool("p").map_err(|error| error.to_string());
        assert_eq!(removed, expected.map_err(String::from));
    }
}

#[test]
fn an_error_of_etcd_is_not_asked_elsewhere() {
    let refusing =
        FakeEtcd::json("400 Bad Request", r#"{"error":"etcdserver: too many operations","code":3}"#);
    let other = FakeEtcd::start(|stream| _ = stream.write_all(&json_answer("200 OK", POOLS)));
    let map = EtcdMap::new(&format!("{},{}", refusing.url, other.url)).unwrap();
    assert!(map.pools().unwrap_err().to_string().contains("status 400: etcdserver: too many operations"));
    assert_eq!((refusing.requests(), other.requests()), (1, 0));
}

#[test]
fn records_of_something_else_are_errors_with_their_names() {
    let record = |value: &str| {
        POOLS.replace("eyJmaXJzdF9ncm91cCI6MCwiZ3JvdXBzIjo4LCJyZXBsaWNhcyI6MiwiaW5fc3luY19taW4iOjF9", value)
    };
    let fake = FakeEtcd::json("200 OK", &record("e30="));
    let error = EtcdMap::new(&fake.url).unwrap().pools().unwrap_err();
    assert!(matches!(&error, MapError::Record { what, .. } if what == "pools/p"), "{error}");
    // A transaction whose answer lacks a part.
    let fake = FakeEtcd::json("200 OK", r#"{"succeeded":true,"responses":[]}"#);
    let config = GroupConfig { epoch: 1, primary: ReplicaId(1), in_sync: vec![ReplicaId(1)] };
    let proposal = GroupRecord { config, replicas: vec![ReplicaId(1)] };
    let error =
        EtcdMap::new(&fake.url).unwrap().propose_group(GroupId(1), &proposal).unwrap_err().to_string();
    assert!(error.contains("0 answers to 1 proposals"), "{error}");
}

#[test]
fn a_watch_survives_lines_that_are_no_events_and_a_compaction() {
    let line = |json: &str| format!("{:x}\r\n{json}\n\r\n", json.len() + 1);
    let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    let created = line(r#"{"result":{"header":{"revision":"7"},"created":true}}"#);
    let answers = [
        format!("{head}{}", line("nonsense")),
        format!("{head}{}", line(r#"{"error":{"message":"no"}}"#)),
        format!("{head}{created}"),
        // What it would continue with is compacted.
        format!(
            "{head}{}",
            line(r#"{"result":{"header":{"revision":"9"},"canceled":true,"compact_revision":"9"}}"#)
        ),
        format!("{head}{created}"),
    ];
    let next = AtomicUsize::new(0);
    let fake = FakeEtcd::start(move |stream| {
        let answer = answers.get(next.fetch_add(1, Ordering::SeqCst));
        let _ = stream.write_all(answer.map_or(&[][..], |answer| answer.as_bytes()));
        let _ = stream.shutdown(std::net::Shutdown::Both);
    });
    let mut changes = EtcdMap::new(&fake.url).unwrap().changes();
    let mut wait = || changes.wait(Duration::from_secs(5));
    assert!(wait().unwrap_err().to_string().contains("no JSON of etcd"));
    assert!(wait().unwrap_err().to_string().contains("ends with an error"));
    assert_eq!(wait().unwrap(), [MapChange::Everything]);
    assert!(wait().unwrap_err().to_string().contains("before the end"));
    assert_eq!(wait().unwrap(), []);
    assert_eq!(wait().unwrap(), [MapChange::Everything]);
}

/// A file with a user, which its owner alone can read.
fn user_file(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("ringbolt-faults-{name}-{}", std::process::id()));
    std::fs::write(&path, "ringbolt:secret").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    path
}

const INVALID_TOKEN: &str = r#"{"error":"etcdserver: invalid auth token","code":16}"#;

#[test]
fn an_authentication_fails_with_a_named_error_and_no_secret_is_printed() {
    let file = user_file("names");
    let files = EtcdFiles { user: Some(file.clone()), ..Default::default() };
    let cases = [
        ("200 OK", "{}", "its answer to an authentication has no token"),
        ("200 OK", r#"{"token":"s3cret\r\nHost: x"}"#, "its answer to an authentication has no token"),
        ("200 OK", r#""s3cret""#, "its answer is malformed"),
        ("200 OK", r#"{"token":{"s3cret":1}}"#, "its answer is malformed"),
        ("200 OK", r#"{"token":"s3cret"#, "its answer is malformed"),
        ("503 Unavailable", r#"{"error":"no leader","code":14}"#, "status 503: no leader"),
    ];
    for (status, answer, reason) in cases {
        let fake = FakeEtcd::json(status, answer);
        let map = EtcdMap::with_files(&fake.url, &files).unwrap();
        let error = map.pools().unwrap_err().to_string();
        assert!(error.contains(reason) && error.contains("in etcd at 127.0.0.1:"), "{reason}: {error}");
        assert!(!error.contains("secret") && !error.contains("s3cret"), "{error}");
        // Nothing but the authentication was asked for.
        assert_eq!(fake.requests(), 1, "{answer}");
    }
    std::fs::remove_file(file).unwrap();
}

#[test]
fn a_wrong_password_is_sent_once() {
    let file = user_file("once");
    let fake = FakeEtcd::json(
        "400 Bad Request",
        r#"{"error":"etcdserver: authentication failed, invalid user ID or password","code":3}"#,
    );
    let map = EtcdMap::with_files(&fake.url, &EtcdFiles { user: Some(file.clone()), ..Default::default() })
        .unwrap();
    let mut changes = map.changes();
    for _ in 0..5 {
        for error in [map.pools().unwrap_err(), changes.wait(Duration::from_secs(1)).unwrap_err()] {
            assert!(error.to_string().contains("invalid user ID or password"), "{error}");
        }
    }
    assert_eq!(fake.requests(), 1);
    std::fs::remove_file(file).unwrap();
}

#[test]
fn a_request_whose_new_token_is_refused_too_ends() {
    let file = user_file("loop");
    let fake = FakeEtcd::answering(|stream, request| {
        let answer = match request.contains("secret") {
            true => json_answer("200 OK", r#"{"token":"a.1"}"#),
            false => json_answer("401 Unauthorized", INVALID_TOKEN),
        };
        let _ = stream.write_all(&answer);
    });
    let map = EtcdMap::with_files(&fake.url, &EtcdFiles { user: Some(file.clone()), ..Default::default() })
        .unwrap();
    let refused = || assert!(map.pools().unwrap_err().to_string().contains("invalid auth token"));
    refused();
    assert_eq!(fake.requests(), 2, "a token that was just given is not replaced");
    std::thread::sleep(Duration::from_secs(1));
    refused();
    // The request, another token, the request again.
    assert_eq!(fake.requests(), 5);
    std::fs::remove_file(file).unwrap();
}

#[test]
fn a_watch_without_rights_says_so_in_every_form_and_does_not_spin() {
    let file = user_file("watch");
    let canceled = r#"{"result":{"header":{"revision":"2"},"watch_id":"-1","created":true,"canceled":true,
        "cancel_reason":"rpc error: code = PermissionDenied desc = etcdserver: permission denied"}}"#;
    let of_stream = r#"{"error":{"grpc_code":7,"http_code":403,"message":"etcdserver: permission denied"}}"#;
    for (status, answer) in [("200 OK", canceled), ("200 OK", of_stream), ("403 Forbidden", of_stream)] {
        let fake = FakeEtcd::answering(move |stream, request| {
            let line = format!("{}\n", answer.replace('\n', ""));
            let answer = match request.contains("secret") {
                true => json_answer("200 OK", r#"{"token":"a.1"}"#),
                false => json_answer(status, &line),
            };
            let _ = stream.write_all(&answer);
        });
        let map =
            EtcdMap::with_files(&fake.url, &EtcdFiles { user: Some(file.clone()), ..Default::default() })
                .unwrap();
        let mut changes = map.changes();
        for _ in 0..3 {
            let error = changes.wait(Duration::from_secs(1)).unwrap_err().to_string();
            assert!(error.contains("permission denied; the user in"), "{error}");
        }
        // One token, and three watches.
        assert_eq!(fake.requests(), 4);
    }
    std::fs::remove_file(file).unwrap();
}
