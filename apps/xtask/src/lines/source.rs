//! Counts the lines of one source file. A lexer blanks comments and literals; the rest finds `#[cfg(test)]` items by
//! their brackets.

/// The count of one source file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct SourceCount {
    /// Lines with code that is not a test.
    pub(crate) code: usize,
    /// Names of the modules that are declared with `#[cfg(test)] mod name;`.
    pub(crate) test_modules: Vec<String>,
}

impl SourceCount {
    /// Counts a file that compiles; the result for other text is unspecified.
    pub(crate) fn of(text: &str) -> SourceCount {
        let mut code = blank_comments(text);
        let mut test_modules = Vec::new();
        let mut from = 0;
        while let Some(attribute) = find(&code, b"#[cfg(", from) {
            let end = item_start(&code, attribute);
            if !is_test_only(&code[attribute..end]) {
                from = attribute + 1;
                continue;
            }
            let (item_end, module) = item_end(&code, end);
            test_modules.extend(module);
            for byte in &mut code[attribute..item_end] {
                if *byte != b'\n' {
                    *byte = b' ';
                }
            }
            from = item_end;
        }
        if find(&code, b"#![cfg(test)]", 0).is_some() {
            return SourceCount { code: 0, test_modules };
        }
        let lines = code.split(|byte| *byte == b'\n');
        let code = lines.filter(|line| line.iter().any(|byte| !byte.is_ascii_whitespace())).count();
        SourceCount { code, test_modules }
    }
}

/// Whether the attributes of an item compile it only for tests: one is `#[cfg(test)]` or `#[cfg(all(test, …))]`.
fn is_test_only(attributes: &[u8]) -> bool {
    let text: String =
        String::from_utf8_lossy(attributes).chars().filter(|char| !char.is_whitespace()).collect();
    text.contains("#[cfg(test)]") || text.contains("#[cfg(all(test,")
}

fn find(code: &[u8], wanted: &[u8], from: usize) -> Option<usize> {
    let windows = code.get(from..)?.windows(wanted.len());
    windows.enumerate().find(|(_, window)| *window == wanted).map(|(at, _)| from + at)
}

/// The end of consecutive attributes that start at `at`, and of the white space after them.
fn item_start(code: &[u8], mut at: usize) -> usize {
    loop {
        while code.get(at).is_some_and(u8::is_ascii_whitespace) {
            at += 1;
        }
        if code.get(at) != Some(&b'#') {
            return at;
        }
        let mut depth = 0;
        while let Some(byte) = code.get(at) {
            at += 1;
            match byte {
                b'[' => depth += 1,
                b']' if depth == 1 => break,
                b']' => depth -= 1,
                _ => {}
            }
        }
    }
}

/// The end of the item that starts at `at`, and the name if it is a module without a body.
fn item_end(code: &[u8], at: usize) -> (usize, Option<String>) {
    let mut depth = 0;
    for (offset, byte) in code[at..].iter().enumerate() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            // The end of an enclosing block or list: the item was its last element.
            b')' | b']' | b'}' if depth == 0 => return (at + offset, None),
            b')' | b']' => depth -= 1,
            b'}' => {
                depth -= 1;
                if depth == 0 {
                    return (at + offset + 1, None);
                }
            }
            b';' if depth == 0 => {
                let item = String::from_utf8_lossy(&code[at..at + offset]).into_owned();
                let name = item.split_once("mod ").map(|(_, name)| name.trim().to_string());
                return (at + offset + 1, name);
            }
            // A field, variant, argument or match arm.
            b',' if depth == 0 => return (at + offset + 1, None),
            _ => {}
        }
    }
    (code.len(), None)
}

/// Replaces comments by spaces, and the content of literals by letters, keeping newlines.
fn blank_comments(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let mut code = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let (end, filler) = if rest.starts_with(b"//") {
            (at + rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len()), b' ')
        } else if rest.starts_with(b"/*") {
            (at + block_comment_len(rest), b' ')
        } else if let Some(length) = raw_string_len(bytes, at) {
            (at + length, b's')
        } else if bytes[at] == b'"' {
            (at + string_len(rest), b's')
        } else if let Some(length) = char_len(text, at) {
            (at + length, b's')
        } else {
            at += 1;
            continue;
        };
        for byte in &mut code[at..end] {
            if *byte != b'\n' {
                *byte = filler;
            }
        }
        at = end;
    }
    code
}

fn block_comment_len(rest: &[u8]) -> usize {
    let (mut at, mut depth) = (0, 0);
    while at < rest.len() {
        if rest[at..].starts_with(b"/*") {
            (at, depth) = (at + 2, depth + 1);
        } else if rest[at..].starts_with(b"*/") {
            (at, depth) = (at + 2, depth - 1);
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

fn string_len(rest: &[u8]) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// The length of a raw string (`r"…"`, `br#"…"#`) that starts at `at`.
fn raw_string_len(bytes: &[u8], at: usize) -> Option<usize> {
    let is_identifier = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    if at > 0 && is_identifier(&bytes[at - 1]) {
        return None;
    }
    let rest = &bytes[at..];
    let prefix = ["r", "br", "cr"].into_iter().find(|prefix| {
        rest.starts_with(prefix.as_bytes()) && matches!(rest.get(prefix.len()), Some(b'"' | b'#'))
    })?;
    let hashes = rest[prefix.len()..].iter().take_while(|byte| **byte == b'#').count();
    let start = prefix.len() + hashes;
    // `r#name` is a raw identifier.
    if rest.get(start) != Some(&b'"') {
        return None;
    }
    let mut terminator = vec![b'"'];
    terminator.resize(hashes + 1, b'#');
    Some(find(rest, &terminator, start + 1).map_or(rest.len(), |end| end + terminator.len()))
}

/// The length of a character literal that starts at `at`; `None` for a lifetime.
fn char_len(text: &str, at: usize) -> Option<usize> {
    let rest = text.get(at..)?.strip_prefix('\'')?;
    let mut chars = rest.char_indices();
    let (_, first) = chars.next()?;
    if first == '\\' {
        // The escaped character may be a quote.
        let end = rest.char_indices().skip(2).find(|(_, char)| *char == '\'')?.0;
        return Some(1 + end + 1);
    }
    let (end, quote) = chars.next()?;
    (quote == '\'').then_some(1 + end + 1)
}
