//! Lines of a Markdown document by kind, and paragraphs wrapped at [`COLUMNS_MAX`].

use super::COLUMNS_MAX;

/// What a line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LineKind {
    /// Fenced or indented code, a fence included.
    Code,
    Heading,
    Table,
    /// HTML, a quotation, or the definition of a link.
    Other,
    Blank,
    /// The first line of a list item, and the columns of its marker with its indentation.
    Item(usize),
    /// Any other line of a paragraph.
    Prose,
}

/// Each line with its kind.
pub(crate) fn kinds(text: &str) -> Vec<(LineKind, &str)> {
    let mut all: Vec<(LineKind, &str)> = Vec::new();
    let (mut fence, mut in_html) = (None, false);
    for line in text.lines() {
        let content = line.trim_start();
        let indentation = line.len() - content.len();
        let previous = all.last().map_or(LineKind::Blank, |(kind, _)| *kind);
        let in_list = all.iter().rev().map(|(kind, _)| *kind).find(|kind| {
            matches!(kind, LineKind::Item(_) | LineKind::Heading | LineKind::Table | LineKind::Other)
        });
        let kind = if let Some(mark) = fence {
            if content.starts_with(mark) {
                fence = None;
            }
            LineKind::Code
        } else if let Some(mark) = ["```", "~~~"].into_iter().find(|mark| content.starts_with(mark)) {
            fence = Some(mark);
            LineKind::Code
        } else if content.is_empty() {
            in_html = false;
            LineKind::Blank
        } else if in_html || content.starts_with('<') && !content.starts_with("<http") {
            in_html = true;
            LineKind::Other
        } else if content.starts_with('>') {
            LineKind::Other
        } else if content.starts_with('#') && content.trim_start_matches('#').starts_with(' ') {
            LineKind::Heading
        } else if content.starts_with('|') {
            LineKind::Table
        } else if let Some(marker) = marker(content) {
            LineKind::Item(indentation + marker)
        } else if indentation >= 4
            && matches!(previous, LineKind::Blank | LineKind::Code)
            && !matches!(in_list, Some(LineKind::Item(_)))
        {
            LineKind::Code
        } else {
            LineKind::Prose
        };
        all.push((kind, line));
    }
    all
}

/// The length of a list marker with the spaces after it.
fn marker(content: &str) -> Option<usize> {
    let digits = content.chars().take_while(char::is_ascii_digit).count();
    let sign = if digits > 0 && digits < 4 { digits + 1 } else { 1 };
    let is_sign = match digits {
        0 => content.starts_with(['-', '*', '+']),
        _ => content[digits..].starts_with(['.', ')']),
    };
    let rest = content.get(sign..)?;
    (is_sign && rest.starts_with(' ')).then(|| sign + rest.len() - rest.trim_start().len())
}

/// The lines of paragraphs and list items, with their numbers from 1.
pub(crate) fn prose(text: &str) -> Vec<(usize, &str)> {
    let lines = kinds(text).into_iter().enumerate();
    let is_prose = |kind| matches!(kind, LineKind::Prose | LineKind::Item(_));
    lines.filter(|(_, (kind, _))| is_prose(*kind)).map(|(index, (_, line))| (index + 1, line)).collect()
}

/// Paragraphs and list items, each with the number of its first line.
pub(crate) fn paragraphs(text: &str) -> Vec<(usize, String)> {
    let mut all: Vec<(usize, String)> = Vec::new();
    let mut open = false;
    for (index, (kind, line)) in kinds(text).into_iter().enumerate() {
        match kind {
            LineKind::Prose if open => {
                if let Some((_, paragraph)) = all.last_mut() {
                    paragraph.push(' ');
                    paragraph.push_str(line.trim());
                }
            }
            LineKind::Prose | LineKind::Item(_) => {
                all.push((index + 1, line.trim().to_string()));
                open = true;
            }
            _ => open = false,
        }
    }
    all
}

/// The document with each paragraph that has a line beyond [`COLUMNS_MAX`] filled anew. Code, tables,
/// headings and paragraphs that fit stay as they are.
pub(crate) fn wrapped(text: &str) -> String {
    let lines = kinds(text);
    let mut result = String::new();
    let mut index = 0;
    while let Some((kind, line)) = lines.get(index) {
        let is_paragraph = matches!(kind, LineKind::Prose | LineKind::Item(_));
        let after = lines[index + 1..].iter().take_while(|(kind, _)| *kind == LineKind::Prose).count();
        let end = if is_paragraph { index + 1 + after } else { index + 1 };
        let paragraph = &lines[index..end];
        // Two spaces or a backslash at the end of a line break it.
        let is_broken = paragraph.iter().any(|(_, line)| line.ends_with("  ") || line.ends_with('\\'));
        if is_paragraph && !is_broken && paragraph.iter().any(|(_, line)| line.chars().count() > COLUMNS_MAX)
        {
            let width = line.len() - line.trim_start().len();
            let (first, hanging) = match kind {
                LineKind::Item(marker) => (line[..*marker].to_string(), *marker),
                _ => (" ".repeat(width), width),
            };
            let joined: Vec<&str> = paragraph.iter().map(|(_, line)| line.trim()).collect();
            let words = joined.join(" ");
            let words = &words[first.trim_start().len()..];
            fill(&mut result, &first, &" ".repeat(hanging), words);
        } else {
            for (_, line) in paragraph {
                result.push_str(line);
                result.push('\n');
            }
        }
        index = end;
    }
    if !text.ends_with('\n') {
        result.pop();
    }
    result
}

fn fill(result: &mut String, first: &str, hanging: &str, words: &str) {
    let mut line = first.to_string();
    let mut is_empty = true;
    for word in unbreakable(words) {
        let width = line.chars().count() + usize::from(!is_empty) + word.chars().count();
        if !is_empty && width > COLUMNS_MAX && !would_be_markup(&word) {
            result.push_str(line.trim_end());
            result.push('\n');
            line = hanging.to_string();
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(&word);
        is_empty = false;
    }
    result.push_str(line.trim_end());
    result.push('\n');
}

/// Words between which a line may be broken: not within code or a link.
fn unbreakable(words: &str) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    let mut open = false;
    for word in words.split_whitespace() {
        match all.last_mut() {
            Some(last) if open => {
                last.push(' ');
                last.push_str(word);
            }
            _ => all.push(word.to_string()),
        }
        let last = all.last().map_or("", String::as_str);
        let in_code = last.matches('`').count() % 2 == 1;
        let in_link = last.matches('[').count() > last.matches(']').count();
        // An unbalanced bracket or backtick of prose must not join the rest of the paragraph.
        open = (in_code || in_link) && last.len() < COLUMNS_MAX;
    }
    all
}

/// Whether a word at the start of a line begins a list, a heading, a quotation or a table.
fn would_be_markup(word: &str) -> bool {
    word.starts_with(['#', '>', '|']) || marker(&format!("{word} ")).is_some()
}
