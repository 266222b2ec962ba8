//! Requests to etcd: one connection, to the first of several endpoints that answers.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use secret::Secret;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::connection::{Endpoint, HttpConnection, HttpError};
use super::files::EtcdFiles;
use super::messages::{AuthenticateAnswer, GatewayError, KeyValue, RangeAnswer, Refusal, base64};
use super::session::{EtcdSession, Token, TokenSource};
use super::tls::TlsSettings;
use crate::MapError;

/// How long an endpoint may take. A healthy one answers in milliseconds; one without a leader does not answer.
pub(super) const ANSWER_TIME: Duration = Duration::from_secs(2);
/// With several endpoints, each is asked with these limits first: one whose machine is lost says nothing, and a group waits for
/// the map once its lease has ended.
const FIRST_ANSWER_TIMES: [Duration; 2] = [Duration::from_millis(150), Duration::from_millis(500)];
/// An endpoint may be silent for this many times what the last answer took, so that a slow etcd is not asked several times.
const SLOWER: u32 = 4;
/// Most endpoints.
const ENDPOINTS_MAX: usize = 16;
/// Records of a range that are asked for at a time.
pub(super) const PAGE_RECORDS: usize = 2000;
/// Port of etcd, if a URL has none.
const DEFAULT_PORT: u16 = 2379;

/// Where etcd is, and which of its keys are the cluster's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EtcdLocation {
    pub(super) endpoints: Vec<Endpoint>,
    is_tls: bool,
    /// Ends with a slash.
    pub(super) prefix: String,
}

impl EtcdLocation {
    /// Parses `http://HOST:PORT[/PREFIX]`, or several of them with commas between; `https://` with TLS.
    pub(super) fn parse(urls: &str) -> Result<EtcdLocation, MapError> {
        const FORM: &str = "a URL is http://HOST:PORT, or http://HOST:PORT/PREFIX, or with https://";
        let refuse = |url: &str, reason: &str| Err(MapError::Invalid(format!("etcd {url:?}: {reason}")));
        let mut location: Option<EtcdLocation> = None;
        for url in urls.split(',').map(str::trim) {
            let (is_tls, rest) = match (url.strip_prefix("http://"), url.strip_prefix("https://")) {
                (Some(rest), _) => (false, rest),
                (_, Some(rest)) => (true, rest),
                _ => return refuse(url, FORM),
            };
            let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
            let path = path.trim_matches('/');
            let is_plain =
                |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic() && !b"@?#%".contains(&byte));
            let (host, port) = match authority.rsplit_once(':') {
                Some((host, port)) if !port.ends_with(']') => (host, port.parse().ok()),
                _ => (authority, Some(DEFAULT_PORT)),
            };
            let (Some(port), true) = (port, !host.is_empty() && is_plain(authority) && is_plain(path)) else {
                return refuse(url, FORM);
            };
            let prefix = format!("/{}/", if path.is_empty() { "ringbolt" } else { path });
            let endpoint = Endpoint { authority: format!("{host}:{port}") };
            match &mut location {
                None => location = Some(EtcdLocation { endpoints: vec![endpoint], is_tls, prefix }),
                Some(known) if known.prefix != prefix => {
                    return refuse(
                        url,
                        "all URLs of a cluster have one prefix, as http://A:2379/PREFIX,http://B:2379/PREFIX",
                    );
                }
                // What is secret on one connection is not sent in the clear on the next.
                Some(known) if known.is_tls != is_tls => {
                    return refuse(url, "all URLs of a cluster have https://, or none");
                }
                Some(known) if known.endpoints.len() >= ENDPOINTS_MAX => {
                    return refuse(url, "there are more than 16 URLs");
                }
                Some(known) => known.endpoints.push(endpoint),
            }
        }
        location.ok_or_else(|| MapError::Invalid("etcd has no URL".to_string()))
    }
}

#[derive(Default)]
struct Current {
    /// Index of the endpoint that is asked first.
    endpoint: usize,
    connection: Option<HttpConnection>,
    last_answer_time: Duration,
}

/// The values of groups' records, as they were read last: what a proposal replaces. A revision would say the
/// same until the map is an older copy of itself, which counts other changes with the same numbers.
#[derive(Default)]
pub(super) struct KnownGroups(Mutex<BTreeMap<u32, Vec<u8>>>);

impl KnownGroups {
    pub(super) fn note(&self, group: u32, value: &[u8]) {
        sync::lock(&self.0).insert(group, value.to_vec());
    }

    pub(super) fn get(&self, group: u32) -> Option<Vec<u8>> {
        sync::lock(&self.0).get(&group).cloned()
    }
}

/// A client. Requests of several threads are made one after another.
pub(super) struct EtcdClient {
    pub(super) location: EtcdLocation,
    /// Of `https://`.
    tls: Option<TlsSettings>,
    session: EtcdSession,
    current: Mutex<Current>,
    pub(super) groups: KnownGroups,
}

/// Why a request has no answer.
struct AskError {
    /// `HOST:PORT` of the first endpoint that failed.
    authority: String,
    reason: String,
    refusal: Refusal,
}

/// A request.
#[derive(Clone, Copy)]
struct Post<'a> {
    path: &'a str,
    token: Option<&'a Token>,
    body: &'a [u8],
}

/// What an endpoint made of a request.
enum Asked<T> {
    Answer(T),
    /// Others would refuse it too.
    Refused(AskError),
    /// Another one may answer.
    Failed(AskError),
    /// It said nothing so far.
    Silent(AskError),
}

impl EtcdClient {
    /// # Errors
    /// [`MapError::Invalid`] if a file is missing that `https://` needs.
    pub(super) fn new(location: EtcdLocation, files: EtcdFiles) -> Result<EtcdClient, MapError> {
        let tls = location.is_tls.then(|| TlsSettings::new(&files)).transpose()?;
        let session = EtcdSession::new(files.user);
        Ok(EtcdClient { location, tls, session, current: Mutex::default(), groups: KnownGroups::default() })
    }

    pub(super) fn connect(&self, endpoint: &Endpoint) -> Result<HttpConnection, HttpError> {
        HttpConnection::open(endpoint, self.tls.as_ref(), ANSWER_TIME)
    }

    /// The request's answer, of the first endpoint that gives one. A request that fails may have been carried out: those
    /// that change something are made so that they can be repeated.
    pub(super) fn post<T: DeserializeOwned>(&self, path: &str, request: &Value) -> Result<T, MapError> {
        let body = request.to_string().into_bytes();
        let mut current = sync::lock(&self.current);
        let token = self.token_in(&mut current)?;
        let error = match self.ask_any(&mut current, Post { path, token: token.as_ref(), body: &body }) {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        if !self.session.is_stale(token.as_ref(), error.refusal, false, Instant::now()) {
            return Err(self.failed(&error));
        }
        // Once: a token that was just given is not the reason.
        let token = self.token_in(&mut current)?;
        let again = Post { path, token: token.as_ref(), body: &body };
        self.ask_any(&mut current, again).map_err(|error| self.failed(&error))
    }

    /// The token for a watch; `None` without a user, or if etcd has its users disabled.
    pub(super) fn token(&self) -> Result<Option<Token>, MapError> {
        self.token_in(&mut sync::lock(&self.current))
    }

    /// What is wrong with a watch that etcd refuses; `None` if it is to be repeated with another token.
    pub(super) fn refused_watch(&self, token: Option<&Token>, reason: &str) -> Option<String> {
        let refusal = Refusal::of(reason);
        let is_stale = self.session.is_stale(token, refusal, true, Instant::now());
        (!is_stale).then(|| self.explain(refusal, reason))
    }

    fn token_in(&self, current: &mut Current) -> Result<Option<Token>, MapError> {
        let user = match self.session.next(Instant::now())? {
            TokenSource::Known(token) => return Ok(token),
            TokenSource::Authenticate(user) => user,
        };
        let body = json!({ "name": user.name, "password": user.password.reveal_text() });
        let body = Secret::new(body.to_string());
        let request = Post { path: "/v3/auth/authenticate", token: None, body: body.reveal() };
        let answer: AuthenticateAnswer = match self.ask_any(current, request) {
            Ok(answer) => answer,
            Err(error) if error.refusal == Refusal::NotEnabled => {
                self.session.authenticated(None);
                return Ok(None);
            }
            Err(error) => {
                let is_refused = error.refusal == Refusal::User;
                let error = self.failed(&error);
                if is_refused {
                    self.session.refused(user, Instant::now(), &error);
                }
                return Err(error);
            }
        };
        let Some(token) = Token::new(answer.token, Instant::now()) else {
            let authority = self.location.endpoints[current.endpoint].authority.clone();
            let reason = "its answer to an authentication has no token".to_string();
            return Err(self.failed(&AskError { authority, reason, refusal: Refusal::Other }));
        };
        self.session.authenticated(Some(token.clone()));
        Ok(Some(token))
    }

    fn failed(&self, error: &AskError) -> MapError {
        let what = format!("in etcd at {}", error.authority);
        MapError::Storage { what, reason: self.explain(error.refusal, &error.reason) }
    }

    /// A reason of etcd's, and what to do.
    fn explain(&self, refusal: Refusal, reason: &str) -> String {
        let prefix = &self.location.prefix;
        let advice = match (refusal, &self.session.file) {
            (Refusal::Token | Refusal::Permission, None) => {
                "it has users, and no file has one for this cluster: --etcd-user-file names it".to_string()
            }
            (Refusal::Permission, Some(file)) => format!(
                "the user in {} needs a role with all rights below {prefix}: \
                 `etcdctl role grant-permission ROLE --prefix=true readwrite {prefix}`",
                file.display()
            ),
            (Refusal::CommonName, _) => {
                "with users, etcd takes only client certificates without a CommonName \
                                         here: --etcd-user-file names the user"
                    .to_string()
            }
            (Refusal::User, Some(file)) => {
                format!("the user in {} or its password is not one of etcd's", file.display())
            }
            _ => return reason.to_string(),
        };
        format!("{reason}; {advice}")
    }

    /// The answer of the first endpoint that gives one. Those that are silent are asked again, with more time.
    fn ask_any<T: DeserializeOwned>(&self, current: &mut Current, request: Post) -> Result<T, AskError> {
        let endpoints = self.location.endpoints.len();
        let first_times =
            if endpoints > 1 && may_repeat(request.path) { &FIRST_ANSWER_TIMES[..] } else { &[] };
        let usual = current.last_answer_time.saturating_mul(SLOWER);
        let limits = first_times.iter().map(|limit| usual.max(*limit)).filter(|limit| *limit < ANSWER_TIME);
        let mut is_silent = vec![true; endpoints];
        let mut first: Option<(usize, AskError)> = None;
        for limit in limits.chain([ANSWER_TIME]).flat_map(|limit| std::iter::repeat_n(limit, endpoints)) {
            let index = current.endpoint;
            if is_silent[index] {
                let asked = Instant::now();
                let error = match self.ask_one(current, request, limit) {
                    Asked::Answer(answer) => {
                        current.last_answer_time = asked.elapsed();
                        return Ok(answer);
                    }
                    Asked::Refused(error) => return Err(error),
                    Asked::Failed(error) => {
                        is_silent[index] = false;
                        error
                    }
                    Asked::Silent(error) => error,
                };
                if first.as_ref().is_none_or(|(of, _)| *of == index) {
                    first = Some((index, error));
                }
            }
            current.connection = None;
            current.endpoint = (index + 1) % endpoints;
        }
        Err(first.expect("there is an endpoint").1)
    }

    /// Asks the current endpoint.
    fn ask_one<T: DeserializeOwned>(
        &self,
        current: &mut Current,
        request: Post,
        limit: Duration,
    ) -> Asked<T> {
        let endpoint = &self.location.endpoints[current.endpoint];
        let failed =
            |reason: String, refusal| AskError { authority: endpoint.authority.clone(), reason, refusal };
        match self.ask(current, endpoint, request, limit) {
            Ok((200, answer)) => match serde_json::from_slice(&answer) {
                Ok(answer) => Asked::Answer(answer),
                // Not with the value that was found: it may be a token.
                Err(error) => {
                    let reason = format!("its answer is malformed: {}", place(&error));
                    Asked::Failed(failed(reason, Refusal::Other))
                }
            },
            Ok((status, answer)) => {
                let answer = GatewayError::parse(&answer);
                let text = answer.text();
                let error = failed(format!("status {status}: {text}"), Refusal::of(text));
                // Another endpoint may do what this one cannot: DEADLINE_EXCEEDED, UNAVAILABLE, or no gateway.
                if matches!(answer.code(), 0 | 4 | 14) { Asked::Failed(error) } else { Asked::Refused(error) }
            }
            Err(error) => {
                let asked = if error.is_silence() { Asked::Silent } else { Asked::Failed };
                asked(failed(error.to_string(), Refusal::Other))
            }
        }
    }

    /// Asks an endpoint, which may be silent for `limit`. An answer that has begun has more time.
    fn ask(
        &self,
        current: &mut Current,
        endpoint: &Endpoint,
        request: Post,
        limit: Duration,
    ) -> Result<(u16, Vec<u8>), HttpError> {
        let Post { path, token, body } = request;
        let authorization = token.map(Token::authorization);
        if let Some(mut connection) = current.connection.take() {
            // The server may have closed it since the last answer: then a new one is tried.
            let answer = connection
                .send(path, authorization, body, limit)
                .and_then(|()| connection.receive(limit, ANSWER_TIME));
            match answer {
                Ok(answer) => {
                    current.connection = Some(connection).filter(HttpConnection::is_reusable);
                    return Ok(answer);
                }
                Err(HttpError::Failed(_) | HttpError::Truncated) => {}
                Err(error) => return Err(error),
            }
        }
        let mut connection = HttpConnection::open(endpoint, self.tls.as_ref(), limit)?;
        connection.send(path, authorization, body, limit)?;
        let answer = connection.receive(limit, ANSWER_TIME)?;
        current.connection = Some(connection).filter(HttpConnection::is_reusable);
        Ok(answer)
    }

    /// The record of a key.
    pub(super) fn get(&self, key: &str) -> Result<Option<KeyValue>, MapError> {
        let answer: RangeAnswer = self.post("/v3/kv/range", &json!({ "key": base64(key) }))?;
        Ok(answer.kvs.into_iter().next())
    }

    /// The records from one key to before another, all as of one revision.
    pub(super) fn range(&self, from: &[u8], to: &[u8]) -> Result<Vec<KeyValue>, MapError> {
        self.range_at(from, to).map(|(all, _)| all)
    }

    /// The same, with that revision.
    pub(super) fn range_at(&self, from: &[u8], to: &[u8]) -> Result<(Vec<KeyValue>, u64), MapError> {
        let mut all: Vec<KeyValue> = Vec::new();
        let mut revision = 0;
        loop {
            let mut from = all.last().map_or_else(|| from.to_vec(), |last| last.key.clone());
            if !all.is_empty() {
                from.push(0);
            }
            let request = json!({
                "key": base64(&from),
                "range_end": base64(to),
                "limit": PAGE_RECORDS.to_string(),
                "revision": revision.to_string(),
            });
            let answer: RangeAnswer = self.post("/v3/kv/range", &request)?;
            if revision == 0 {
                revision = answer.header.revision;
            }
            let is_last = !answer.more || answer.kvs.is_empty();
            all.extend(answer.kvs);
            if is_last {
                return Ok((all, u64::try_from(revision).unwrap_or(0)));
            }
        }
    }
}

/// Whether a request may be made to another endpoint while this one may still carry it out later. A value that is put without
/// a comparison could replace a newer one, and an authentication costs etcd a slow hash.
fn may_repeat(path: &str) -> bool {
    ["/v3/kv/range", "/v3/kv/txn", "/v3/lease/keepalive"].contains(&path)
}

/// Where JSON is wrong, and in which way.
fn place(error: &serde_json::Error) -> String {
    let kind = if error.is_data() { "a value is of another type, or missing" } else { "it is no JSON" };
    format!("{kind}, line {} column {}", error.line(), error.column())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_endpoints_and_a_prefix() {
        let parse = |urls: &str| EtcdLocation::parse(urls).map_err(|error| error.to_string());
        let location = parse("http://10.0.0.1:2379,http://etcd-2, http://[::1]:99/").unwrap();
        let authorities: Vec<_> = location.endpoints.iter().map(|it| it.authority.as_str()).collect();
        assert_eq!(authorities, ["10.0.0.1:2379", "etcd-2:2379", "[::1]:99"]);
        assert_eq!(location.prefix, "/ringbolt/");
        assert_eq!(parse("http://[::1]/blocks/a/").unwrap().prefix, "/blocks/a/");
        for (urls, reason) in [
            ("", "a URL is"),
            ("10.0.0.1:2379", "a URL is"),
            ("http://", "a URL is"),
            ("http://:2379", "a URL is"),
            ("http://host:x", "a URL is"),
            ("http://host:70000", "a URL is"),
            ("http://user@host", "a URL is"),
            ("http://a,,http://b", "a URL is"),
            ("https://", "a URL is"),
            ("ftp://host", "a URL is"),
            ("https://a,http://b", "all URLs of a cluster have https://, or none"),
            ("http://a,https://b", "all URLs of a cluster have https://, or none"),
            ("http://a/x,http://b/y", "one prefix"),
            ("http://a,".repeat(17).trim_end_matches(','), "more than 16"),
        ] {
            let error = parse(urls).unwrap_err();
            assert!(error.contains(reason), "{urls}: {error}");
        }
    }
}
