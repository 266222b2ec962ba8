use super::*;

/// The circles of files, as `a, b`.
fn found(files: &[(&str, &str)]) -> Vec<String> {
    let module = |path: &str| path.split("::").filter(|part| !part.is_empty()).map(str::to_string).collect();
    let files = files.iter().map(|(path, text)| (module(path), text.to_string())).collect();
    circles(&files).iter().map(|circle| describe(circle)).collect()
}

#[test]
fn files_that_import_each_other_are_a_circle() {
    let a = "use crate::b::{self, C};\nfn f() {}";
    assert_eq!(found(&[("", "mod a;\nmod b;"), ("a", a), ("b", "fn g() { crate::a::f() }")]), ["a, b"]);
    assert_eq!(found(&[("", "mod a;\nmod b;"), ("a", a), ("b", "fn g() {}")]), [""; 0]);
}

#[test]
fn a_parent_that_uses_what_uses_it_is_in_a_circle() {
    let parent = "mod child;\nstruct T;\nfn f() { child::g() }";
    assert_eq!(found(&[("p", parent), ("p::child", "use super::T;")]), ["p, p::child"]);
    assert_eq!(found(&[("p", "mod child;\npub use child::U;"), ("p::child", "use super::T;")]), [""; 0]);
}

#[test]
fn names_are_followed_through_re_exports() {
    let files = [
        ("", "mod a;\nmod b;\npub use a::{inner::T, U};"),
        ("a", "pub(crate) mod inner;"),
        ("a::inner", "use crate::b::V;"),
        ("b", "use crate::T;"),
    ];
    assert_eq!(found(&files), ["a::inner, b"]);
}

#[test]
fn comments_strings_and_tests_are_no_imports() {
    let b = "// crate::a::f\nfn g() { \"crate::a::f\\\"\"; }\n#[cfg(test)]\nmod tests {\nuse crate::a;\n}";
    assert_eq!(found(&[("a", "use crate::b;"), ("b", b)]), [""; 0]);
}

#[test]
fn three_files_in_a_ring_are_one_circle() {
    let files = [
        ("a", "use crate::b::X;"),
        ("b", "use crate::c::X;"),
        ("c", "use crate::a::X;"),
        ("d", "use crate::a::X;"),
    ];
    assert_eq!(found(&files), ["a, b, c"]);
}
