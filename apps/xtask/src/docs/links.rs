//! Links and headings of a Markdown document.

use std::collections::BTreeSet;

use super::wrap::{LineKind, kinds};

/// The targets of relative links and pictures, each with its line, which counts from 1.
pub(crate) fn targets(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (index, (kind, line)) in kinds(text).into_iter().enumerate() {
        if kind == LineKind::Code {
            continue;
        }
        let line = without_code(line);
        for (start, end) in [("](", ')'), ("src=\"", '"'), ("srcset=\"", '"'), ("href=\"", '"')] {
            for after in line.split(start).skip(1) {
                let target = after.split(end).next().unwrap_or_default();
                if !target.is_empty() && !target.contains("://") && !target.starts_with("mailto:") {
                    found.push((index + 1, target.to_string()));
                }
            }
        }
    }
    found
}

/// The anchors that GitHub gives to the headings.
pub(crate) fn anchors(text: &str) -> BTreeSet<String> {
    let mut all: BTreeSet<String> = BTreeSet::new();
    for (kind, line) in kinds(text) {
        if kind != LineKind::Heading {
            continue;
        }
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let keep = |letter: &char| letter.is_alphanumeric() || [' ', '-', '_'].contains(letter);
        let anchor: String = title.chars().filter(keep).map(|it| if it == ' ' { '-' } else { it }).collect();
        let repeated = (1..).map(|number| format!("{anchor}-{number}"));
        let free = std::iter::once(anchor.clone()).chain(repeated).find(|name| !all.contains(name));
        all.extend(free);
    }
    all
}

/// The line with inline code blanked.
fn without_code(line: &str) -> String {
    let parts = line.split('`').enumerate();
    parts.map(|(index, part)| if index % 2 == 0 { part } else { "" }).collect::<Vec<_>>().join("`")
}
