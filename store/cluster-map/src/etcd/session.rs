//! The user that requests are made as: its name and password in a file, and the token that etcd gives for
//! them.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use secret::Secret;

use super::files::{EtcdFileError, read_private};
use super::messages::Refusal;
use crate::MapError;

/// Most bytes of the file.
const USER_BYTES_MAX: usize = 4096;
/// Most bytes of a token: a signed one (JWT) has about 1 KiB.
const TOKEN_BYTES_MAX: usize = 8 << 10;
/// A name and password that etcd refused are not sent again for this time: each attempt costs etcd a hash
/// that is slow on purpose, and changes are waited for five times a second.
const REFUSED_TIME: Duration = Duration::from_secs(5);
/// A token is not replaced before this time, for the same reason.
const TOKEN_TIME_MIN: Duration = Duration::from_secs(1);
/// Servers before 3.4.20 and 3.5.5 say `permission denied` of a watch whose token has expired. A token as old
/// as this may be such a one; a missing right costs one more authentication in this time.
const TOKEN_TIME_DOUBTED: Duration = Duration::from_secs(5);

/// A user of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EtcdUser {
    pub(super) name: String,
    /// Text.
    pub(super) password: Secret,
}

impl EtcdUser {
    /// Parses a line `NAME:PASSWORD`.
    fn parse(text: &[u8]) -> Result<EtcdUser, &'static str> {
        let line = str::from_utf8(text).map_err(|_| "it is no text")?;
        let line = line.strip_suffix('\n').unwrap_or(line);
        match line.strip_suffix('\r').unwrap_or(line).split_once(':') {
            Some((name, password)) if !name.is_empty() && !password.is_empty() => {
                if line.contains('\n') {
                    return Err("it has more than one line");
                }
                Ok(EtcdUser { name: name.to_string(), password: Secret::new(password) })
            }
            _ => Err("its only line is NAME:PASSWORD"),
        }
    }

    /// Reads the user in a file that its owner alone can read.
    ///
    /// # Errors
    /// [`EtcdFileError`].
    pub(super) fn load(path: &Path) -> Result<EtcdUser, EtcdFileError> {
        let text = read_private(path, USER_BYTES_MAX)?;
        EtcdUser::parse(text.reveal()).map_err(|reason| EtcdFileError::new(path, reason))
    }
}

/// What etcd gave for a name and a password.
#[derive(Clone, Debug)]
pub(super) struct Token {
    /// The value of the field `Authorization`: text.
    text: Secret,
    obtained: Instant,
}

impl Token {
    /// A token that was given at `now`; `None` if no header field can have it.
    pub(super) fn new(text: String, now: Instant) -> Option<Token> {
        let is_one = (1..=TOKEN_BYTES_MAX).contains(&text.len())
            && text.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ');
        is_one.then(|| Token { text: Secret::new(text), obtained: now })
    }

    /// The value of the field `Authorization`.
    pub(super) fn authorization(&self) -> &str {
        self.text.reveal_text().expect("it was made of text")
    }
}

enum SessionState {
    /// Nothing was asked.
    New,
    /// etcd has its users disabled.
    WithoutUsers,
    WithToken(Token),
    /// etcd refused this user.
    Refused {
        user: EtcdUser,
        at: Instant,
        error: MapError,
    },
}

/// What to do for a request's token.
pub(super) enum TokenSource {
    /// The request has this one, or none.
    Known(Option<Token>),
    /// Ask for one as this user.
    Authenticate(EtcdUser),
}

/// The token of a process, sans-IO: [`next`](Self::next) before a request,
/// [`authenticated`](Self::authenticated) with what it asked for, [`is_stale`](Self::is_stale) after a
/// refusal says whether to begin again.
pub(super) struct EtcdSession {
    pub(super) file: Option<PathBuf>,
    state: Mutex<SessionState>,
}

impl EtcdSession {
    pub(super) fn new(file: Option<PathBuf>) -> EtcdSession {
        EtcdSession { file, state: Mutex::new(SessionState::New) }
    }

    /// Where the token of a request comes from. The file is read for each authentication, so that a new
    /// password needs no restart.
    pub(super) fn next(&self, now: Instant) -> Result<TokenSource, MapError> {
        let Some(file) = &self.file else { return Ok(TokenSource::Known(None)) };
        let state = sync::lock(&self.state);
        match &*state {
            SessionState::WithoutUsers => return Ok(TokenSource::Known(None)),
            SessionState::WithToken(token) => return Ok(TokenSource::Known(Some(token.clone()))),
            SessionState::New | SessionState::Refused { .. } => {}
        }
        let user = EtcdUser::load(file)?;
        match &*state {
            SessionState::Refused { user: refused, at, error }
                if *refused == user && now.saturating_duration_since(*at) < REFUSED_TIME =>
            {
                Err(error.clone())
            }
            _ => Ok(TokenSource::Authenticate(user)),
        }
    }

    /// What [`TokenSource::Authenticate`] gave: a token, or none because etcd has its users disabled.
    pub(super) fn authenticated(&self, token: Option<Token>) {
        *sync::lock(&self.state) = token.map_or(SessionState::WithoutUsers, SessionState::WithToken);
    }

    /// etcd refused the user.
    pub(super) fn refused(&self, user: EtcdUser, now: Instant, error: &MapError) {
        *sync::lock(&self.state) = SessionState::Refused { user, at: now, error: error.clone() };
    }

    /// Whether a request that was refused is to be repeated with another token. Then this one is forgotten.
    pub(super) fn is_stale(
        &self,
        token: Option<&Token>,
        refusal: Refusal,
        is_watch: bool,
        now: Instant,
    ) -> bool {
        let age_min = match refusal {
            Refusal::Token => TOKEN_TIME_MIN,
            // A server that requires client certificates answers a request without a token with it.
            Refusal::Permission if token.is_none() => Duration::ZERO,
            Refusal::Permission if is_watch => TOKEN_TIME_DOUBTED,
            _ => return false,
        };
        let is_old = token.is_none_or(|token| now.saturating_duration_since(token.obtained) >= age_min);
        if self.file.is_none() || !is_old {
            return false;
        }
        let mut state = sync::lock(&self.state);
        let is_current = match (&*state, token) {
            (SessionState::WithToken(current), Some(token)) => current.text == token.text,
            (SessionState::WithoutUsers, None) => true,
            _ => false,
        };
        if is_current {
            *state = SessionState::New;
        }
        true
    }
}

#[cfg(test)]
mod tests;
