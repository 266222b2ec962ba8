use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::etcd::messages::AuthenticateAnswer;

/// A file with a user, removed on drop.
struct UserFile(PathBuf);

impl UserFile {
    fn new(name: &str, text: &str) -> UserFile {
        let path = std::env::temp_dir().join(format!("ringbolt-user-{name}-{}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        UserFile(path)
    }
}

impl Drop for UserFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn error(reason: &str) -> MapError {
    MapError::Storage { what: "in etcd".to_string(), reason: reason.to_string() }
}

#[test]
fn a_user_is_one_line_with_a_name_and_a_password() {
    let user =
        |name: &str, password: &str| Ok(EtcdUser { name: name.to_string(), password: Secret::new(password) });
    let cases: [(&[u8], _); 10] = [
        (b"a:b", user("a", "b")),
        (b"a:b\n", user("a", "b")),
        (b"a:b\r\n", user("a", "b")),
        (b"a: b:c ", user("a", " b:c ")),
        (b"", Err("its only line is NAME:PASSWORD")),
        (b"\n", Err("its only line is NAME:PASSWORD")),
        (b":b", Err("its only line is NAME:PASSWORD")),
        (b"a:", Err("its only line is NAME:PASSWORD")),
        (b"a:b\nc:d\n", Err("it has more than one line")),
        (b"a:\xff", Err("it is no text")),
    ];
    for (text, expected) in cases {
        assert_eq!(EtcdUser::parse(text), expected, "{}", text.escape_ascii());
    }
    // What is logged of a user or a token has no secret.
    let printed = format!(
        "{:?} {:?}",
        EtcdUser::parse(b"a:swordfish"),
        Token::new("swordfish".to_string(), Instant::now())
    );
    assert!(printed.contains("password: …") && !printed.contains("swordfish"), "{printed}");
}

#[test]
fn a_file_with_a_user_is_small_and_for_its_owner_alone() {
    let file = UserFile::new("rights", "a:secret\n");
    assert_eq!(EtcdUser::load(&file.0).unwrap().name, "a");
    for mode in [0o640, 0o604, 0o620, 0o601] {
        std::fs::set_permissions(&file.0, std::fs::Permissions::from_mode(mode)).unwrap();
        let error = EtcdUser::load(&file.0).unwrap_err().to_string();
        assert!(error.contains(&format!("mode {mode:03o}: chmod 600")), "{error}");
        assert!(error.contains(file.0.to_str().unwrap()) && !error.contains("secret"), "{error}");
    }
    let file = UserFile::new("large", &format!("a:{}", "b".repeat(4096)));
    assert!(EtcdUser::load(&file.0).unwrap_err().to_string().contains("more than 4096 bytes"));
    let missing = EtcdUser::load(Path::new("/nonexistent/user")).unwrap_err().to_string();
    assert!(missing.contains("/nonexistent/user: No such file"), "{missing}");
    let device = EtcdUser::load(Path::new("/dev/zero")).unwrap_err().to_string();
    assert!(device.contains("not a regular file"), "{device}");
}

#[test]
fn a_token_is_what_a_header_field_can_have() {
    let token = |text: &str| {
        Token::new(text.to_string(), Instant::now()).map(|token| token.authorization().to_string())
    };
    assert_eq!(token("rACTmEuXfWCMoJXY.15").as_deref(), Some("rACTmEuXfWCMoJXY.15"));
    assert_eq!(token("Bearer a.b.c").as_deref(), Some("Bearer a.b.c"));
    for other in ["", "a\r\nHost: b", "a\n", "a\0", "ä", &"a".repeat(TOKEN_BYTES_MAX + 1)] {
        assert_eq!(token(other), None, "{other:.20}");
    }
}

#[test]
fn the_answer_to_an_authentication_of_any_shape_gives_a_token_or_none() {
    let mut rng = random::WyRand::new(7);
    let parts = [
        "{",
        "}",
        "\"token\"",
        ":",
        ",",
        "\"a.1\"",
        "\"\\r\\n\"",
        "\"\\u0000\"",
        "\"ä\"",
        "7",
        "null",
        "[",
        "]",
        "{}",
    ];
    let mut tokens = 0;
    for _ in 0..50_000 {
        let mut answer = String::from(if rng.below(2) == 0 { "{\"token\":" } else { "" });
        for _ in 0..rng.below(6) {
            answer.push_str(parts[rng.index(parts.len())]);
        }
        let parsed = serde_json::from_str::<AuthenticateAnswer>(&answer);
        let Some(token) = parsed.ok().and_then(|parsed| Token::new(parsed.token, Instant::now())) else {
            continue;
        };
        assert!(["a.1", "token"].contains(&token.authorization()), "{answer}");
        tokens += 1;
    }
    assert!(tokens > 10, "{tokens}");
}

#[test]
fn a_user_that_is_refused_is_not_tried_again_at_once_unless_its_file_changes() {
    let file = UserFile::new("refused", "a:wrong");
    let session = EtcdSession::new(Some(file.0.clone()));
    let user = |session: &EtcdSession, now| match session.next(now) {
        Ok(TokenSource::Authenticate(user)) => Ok(user),
        Ok(TokenSource::Known(_)) => panic!("there is no token"),
        Err(error) => Err(error.to_string()),
    };
    let begin = Instant::now();
    let wrong = user(&session, begin).unwrap();
    session.refused(wrong.clone(), begin, &error("wrong password"));
    let soon = begin + REFUSED_TIME - Duration::from_nanos(1);
    assert!(user(&session, soon).unwrap_err().contains("wrong password"));
    assert_eq!(user(&session, begin + REFUSED_TIME), Ok(wrong));
    std::fs::write(&file.0, "a:right").unwrap();
    assert_eq!(user(&session, soon).unwrap().password, Secret::new("right"));
}

#[test]
fn a_token_is_replaced_when_it_is_old_and_once() {
    let file = UserFile::new("stale", "a:b");
    let session = EtcdSession::new(Some(file.0.clone()));
    let begin = Instant::now();
    let known = |session: &EtcdSession| match session.next(begin) {
        Ok(TokenSource::Known(Some(token))) => Some(token.authorization().to_string()),
        _ => None,
    };
    let is_known = |session: &EtcdSession| known(session).as_deref() == Some("1");
    let first = Token::new("1".to_string(), begin).unwrap();
    let is_stale = |refusal, is_watch, age| session.is_stale(Some(&first), refusal, is_watch, begin + age);
    let (short, long) = (TOKEN_TIME_MIN, TOKEN_TIME_DOUBTED);
    let nearly = |time: Duration| time - Duration::from_nanos(1);
    for (refusal, is_watch, age, expected) in [
        (Refusal::Token, false, nearly(short), false),
        (Refusal::Token, false, short, true),
        (Refusal::Token, true, short, true),
        (Refusal::Permission, false, long, false),
        (Refusal::Permission, true, nearly(long), false),
        (Refusal::Permission, true, long, true),
        (Refusal::User, false, long, false),
        (Refusal::NotEnabled, false, long, false),
        (Refusal::Other, true, long, false),
    ] {
        session.authenticated(Some(first.clone()));
        assert_eq!(is_stale(refusal, is_watch, age), expected, "{refusal:?} {is_watch} {age:?}");
        assert_eq!(is_known(&session), !expected);
    }
    // Another thread has a new one already: that is used.
    session.authenticated(Token::new("2".to_string(), begin));
    assert!(is_stale(Refusal::Token, false, short));
    assert_eq!(known(&session).as_deref(), Some("2"));
    // Users were disabled, and are enabled now.
    for refusal in [Refusal::Token, Refusal::Permission] {
        session.authenticated(None);
        assert!(matches!(session.next(begin), Ok(TokenSource::Known(None))));
        assert!(session.is_stale(None, refusal, false, begin));
        assert!(matches!(session.next(begin), Ok(TokenSource::Authenticate(_))));
    }
    // Without a user nothing is repeated.
    assert!(!EtcdSession::new(None).is_stale(None, Refusal::Token, false, begin));
}
