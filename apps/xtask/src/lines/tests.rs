#![allow(clippy::unwrap_used)]

use std::fs;

use super::{CrateLines, SourceCount, count_directory, render};

fn code(text: &str) -> usize {
    SourceCount::of(text).code
}

#[test]
fn comments_and_blank_lines_are_not_code() {
    assert_eq!(
        code("//! Docs.\n\n/// More.\nfn f() {} // why\n/* a\n /* nested */\n b */\n  \nconst A: u8 = 1;\n"),
        2
    );
}

#[test]
fn literals_do_not_start_comments_or_end_items() {
    let text = r##"
const A: &str = "// no \" comment";
const B: &str = r#"
/* "text" */
"#;
const C: char = '"';
fn f<'a>(x: &'a str) -> char { '\'' }
"##;
    assert_eq!(code(text), 6);
    let hidden = r##"
#[cfg(test)]
mod tests {
    const A: &str = "}";
    const B: char = '}';
    // }
}
fn f() {}
"##;
    assert_eq!(code(hidden), 1);
}

#[test]
fn test_items_are_not_code() {
    let text = "
use a::b;
#[cfg(test)]
use c::d;
#[cfg(all(test, unix))]
#[allow(dead_code)]
fn f(x: [u8; 4]) {
    g();
}
struct S {
    a: u8,
    #[cfg(test)]
    b: u8,
    #[cfg(test)]
    c: u8
}
#[cfg(not(test))]
fn g() {}
";
    let count = SourceCount::of(text);
    assert_eq!((count.code, count.test_modules), (6, vec![]));
    let count = SourceCount::of("#[cfg(test)]\npub(crate) mod tests;\nmod other;\n");
    assert_eq!((count.code, count.test_modules), (1, vec!["tests".to_string()]));
    assert_eq!(code("#![cfg(test)]\nfn f() {}\n"), 0);
}

#[test]
fn files_of_test_modules_are_not_code() {
    let folder = std::env::temp_dir().join(format!("ringbolt-xtask-lines-{}", std::process::id()));
    let write = |path: &str, text: &str| {
        let path = folder.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("lib.rs", "mod a;\nmod tests_of_others;\n#[cfg(test)]\nmod fixture;\n");
    write("a.rs", "fn f() {}\n#[cfg(test)]\nmod tests;\n");
    write("a/tests.rs", "mod deep;\nfn test() {}\n");
    write("a/tests/deep.rs", "fn test() {}\n");
    write("fixture/mod.rs", "fn fixture() {}\n");
    write("tests_of_others.rs", "fn f() {}\n");
    write("script.py", "print()\n");
    let counted = count_directory(&folder);
    fs::remove_dir_all(&folder).unwrap();
    assert_eq!(counted.unwrap(), (3, 2 + 1 + 1));
}

#[test]
fn simulator_control_plane_and_shell_are_summed_apart() {
    let lines = |folder: &str, code| CrateLines { folder: folder.into(), files: 1, code };
    let crates = [
        lines("base/block-io", 100),
        lines("control", 20),
        lines("sim", 3),
        lines("targets/nvmf", 50),
        lines("targets/shell", 4),
        lines("targets/shellfish", 1),
    ];
    let rows: Vec<Vec<String>> =
        render(&crates).lines().map(|line| line.split_whitespace().map(String::from).collect()).collect();
    let has = |words: &str| rows.iter().any(|row| row.join(" ") == words);
    assert!(has("total 3 151") && has("total of sim, control and targets/shell 3 27"), "{rows:?}");
}

#[test]
fn this_crate_is_counted() {
    let (files, code) =
        count_directory(std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src"))).unwrap();
    assert!(files > 5 && code > 500, "{files} files, {code} lines");
}
