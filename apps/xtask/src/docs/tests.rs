#![allow(clippy::unwrap_used)]

use super::wrap::prose;
use super::*;
use crate::metadata::CargoMetadata;

fn document(path: &str, text: &str) -> Document {
    Document { path: PathBuf::from(path), text: text.to_string() }
}

#[test]
fn links_columns_paragraphs_and_crates_of_the_documents_are_right() {
    let metadata = CargoMetadata::of_this_workspace().unwrap();
    let documents = read_all(metadata.root()).unwrap();
    assert!(documents.len() > 40, "{} documents", documents.len());
    let findings = check(metadata.root(), &documents, &metadata.folders());
    assert!(findings.is_empty(), "{}", findings.join("\n"));
}

#[test]
fn a_link_to_no_file_or_no_heading_is_a_finding() {
    let root = CargoMetadata::of_this_workspace().unwrap().root().to_path_buf();
    let text = "# One `two` & three\n## Same\n## Same\n\
        [a](#one-two--three) [b](#same-1) [c](#same-2) [d](missing.md) [e](https://example.com/x)\n\
        `[f](in-code.md)` [g](../../outside.md) [h](../README.md#nowhere) ![i](docs.md)\n\
        ```\n[j](fenced.md)\n```\n";
    let documents = [document("docs/docs.md", text), document("README.md", "# Title\n")];
    let found = broken_links(&root, &documents[0], &documents);
    let expected = ["#same-2", "missing.md", "../../outside.md", "#nowhere", "docs.md"];
    assert_eq!(found.len(), expected.len() + 2, "{found:#?}");
    for name in expected {
        assert!(found.iter().any(|one| one.contains(name)), "{name}: {found:#?}");
    }
}

#[test]
fn wide_prose_is_filled_and_the_rest_stays() {
    let long = "word ".repeat(30);
    let table = format!("| {long} |");
    let text = format!(
        "# {long}\n{table}\n\n```\n{long}\n```\n\n- {long}`{}` [a link]({}) end\n  short\n\n    - {long}\n\nfits\nas it is\n",
        "c ".repeat(20).trim(),
        "x".repeat(30)
    );
    let result = wrapped(&text);
    let widths = prose(&result).into_iter().map(|(_, line)| line.chars().count());
    assert!(widths.max() <= Some(COLUMNS_MAX), "{result}");
    assert_eq!(wrapped(&result), result);
    assert_eq!(
        result.split_whitespace().collect::<Vec<_>>(),
        text.split_whitespace().collect::<Vec<_>>(),
        "words change"
    );
    for kept in [format!("# {long}\n"), table, format!("```\n{long}\n```"), "fits\nas it is\n".to_string()] {
        assert!(result.contains(&kept), "{kept} is not in {result}");
    }
    assert!(result.contains("\n  word") && result.contains("\n      word"), "{result}");
}

#[test]
fn no_word_at_the_start_of_a_line_becomes_markup() {
    for word in ["-", "1.", "#", "+", ">"] {
        let text = format!("{}{word} {}\n", "a".repeat(COLUMNS_MAX - 2) + " ", "b ".repeat(60));
        let result = wrapped(&text);
        assert!(result.lines().count() > 1, "{result}");
        assert!(!result.lines().any(|line| line.starts_with(word)), "{result}");
    }
}

#[test]
fn paragraphs_are_counted_by_item_and_across_lines() {
    let words = "a b c d e f g h i j\n".repeat(13);
    let text = format!("{words}\n- {words}- short\n\n```\n{words}```\n");
    let found = long_paragraphs(&document("ARCHITECTURE.md", &text));
    assert_eq!(found.len(), 2, "{found:#?}");
    assert!(found[0].starts_with("ARCHITECTURE.md:1: a paragraph of 130 words"), "{found:#?}");
}

#[test]
fn a_crate_without_a_row_and_a_row_without_a_crate_are_findings() {
    let list =
        [document("docs/architecture/crates.md", "| folder |\n| `base/a` | x |\n| `base/c` | `base/b` |\n")];
    let folders = ["base/a".to_string(), "base/b".to_string()];
    let found = unlisted_crates(&list, &folders);
    assert_eq!(found.len(), 2, "{found:#?}");
    assert!(
        found[0].ends_with("no row for base/b") && found[1].ends_with("base/c is no crate"),
        "{found:#?}"
    );
}
