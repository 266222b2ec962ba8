//! An SVG writer that escapes all text from outside.

use std::fmt::Write as _;

use super::palette::MARKS;

/// Escapes `text` for HTML and XML, in elements and in quoted attributes.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // XML forbids control characters, even as character references.
            letter if letter.is_control() && !matches!(letter, '\n' | '\t') => out.push('\u{fffd}'),
            letter => out.push(letter),
        }
    }
    out
}

/// An SVG element under construction.
pub(super) struct Svg {
    out: String,
}

/// The alignment of text relative to its position (`text-anchor`).
#[derive(Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

impl Svg {
    /// Opens a chart. `columns` are the names of the fields of its data, which a script saves as CSV.
    pub(super) fn new(width: f64, height: f64, title: &str, columns: &[&str]) -> Svg {
        Svg::open(0.0, width, height, title, columns)
    }

    /// [`new`](Self::new) with the name of the vertical axis in its upper left corner. What does not fit one line is in
    /// lines above the first, for which the chart is higher.
    pub(super) fn with_label(width: f64, height: f64, title: &str, columns: &[&str], label: &str) -> Svg {
        let lines = wrapped(label, width - 4.0);
        let above = LINE * lines.len().saturating_sub(1) as f64;
        let mut svg = Svg::open(-above, width, height + above, title, columns);
        for (index, line) in lines.iter().enumerate() {
            svg.text("a", 2.0, 14.0 - above + LINE * index as f64, Anchor::Start, line);
        }
        svg
    }

    fn open(top: f64, width: f64, height: f64, title: &str, columns: &[&str]) -> Svg {
        let mut out = String::with_capacity(4096);
        let _ = write!(
            out,
            "<svg class=\"chart\" viewBox=\"0 {top} {w} {h}\" width=\"{w}\" height=\"{h}\" role=\"img\" aria-label=\"{}\" data-columns=\"{}\">",
            escape(title),
            fields(columns),
            top = Px(top),
            w = Px(width),
            h = Px(height)
        );
        Svg { out }
    }

    pub(super) fn finish(mut self) -> String {
        self.out.push_str("</svg>");
        self.out
    }

    /// Opens a group. `class` is not escaped and must be a constant of this crate.
    pub(super) fn group(&mut self, class: &str) {
        let _ = write!(self.out, "<g class=\"{class}\">");
    }

    /// Opens the group of a series; a script can hide it by `name`.
    pub(super) fn series(&mut self, class: &str, name: &str) {
        let _ = write!(self.out, "<g class=\"{class}\" data-s=\"{}\">", escape(name));
    }

    /// Opens the group of a series that has data.
    pub(super) fn series_with_data(&mut self, class: &str, name: &str, data: &ChartData) {
        let _ =
            write!(self.out, "<g class=\"{class}\" data-s=\"{}\" data-v=\"{}\">", escape(name), data.rows);
    }

    /// Opens a group that has data and is no series.
    pub(super) fn data_group(&mut self, class: &str, data: &ChartData) {
        let _ = write!(self.out, "<g class=\"{class}\" data-v=\"{}\">", data.rows);
    }

    pub(super) fn end(&mut self) {
        self.out.push_str("</g>");
    }

    pub(super) fn text(&mut self, class: &str, x: f64, y: f64, anchor: Anchor, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
            Anchor::End => " text-anchor=\"end\"",
        };
        let (x, y, text) = (Px(x), Px(y), escape(text));
        let _ = write!(self.out, "<text class=\"{class}\" x=\"{x}\" y=\"{y}\"{anchor}>{text}</text>");
    }

    pub(super) fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        let (x1, y1, x2, y2) = (Px(from.0), Px(from.1), Px(to.0), Px(to.1));
        let _ = write!(self.out, "<path class=\"{class}\" d=\"M{x1} {y1}L{x2} {y2}\"/>");
    }

    pub(super) fn path(&mut self, class: &str, points: &[(f64, f64)]) {
        let _ = write!(self.out, "<path class=\"{class}\" d=\"");
        for (index, point) in points.iter().enumerate() {
            let _ = write!(self.out, "{}{} {}", if index == 0 { "M" } else { "L" }, Px(point.0), Px(point.1));
        }
        self.out.push_str("\"/>");
    }

    /// A mark at a point; the shape distinguishes series without colour. `tip` is its tooltip.
    pub(super) fn mark(&mut self, shape: usize, at: (f64, f64), tip: &str) {
        let (x, y) = at;
        let place = |dx: f64, dy: f64| format!("{} {}", Px(x + dx), Px(y + dy));
        let d = match shape % MARKS {
            // A circle of radius 3 as two arcs.
            0 => format!("M{}a3 3 0 1 0 6 0a3 3 0 1 0 -6 0Z", place(-3.0, 0.0)),
            1 => format!("M{}h5.4v5.4h-5.4Z", place(-2.7, -2.7)),
            2 => format!("M{}l3.5 6h-7Z", place(0.0, -3.8)),
            3 => format!("M{}l3.7 3.7l-3.7 3.7l-3.7 -3.7Z", place(0.0, -3.7)),
            4 => format!("M{}l3.5 -6h-7Z", place(0.0, 3.8)),
            5 => format!("M{}h2.4v2.4h2.4v2.4h-2.4v2.4h-2.4v-2.4h-2.4v-2.4h2.4Z", place(-1.2, -3.6)),
            6 => format!("M{}l6 3.5v-7Z", place(-3.8, 0.0)),
            _ => format!("M{}l-6 3.5v-7Z", place(3.8, 0.0)),
        };
        let _ = write!(self.out, "<path class=\"m\" d=\"{d}\">");
        self.tip(tip);
        self.out.push_str("</path>");
    }

    /// Many rectangles as one path.
    pub(super) fn rects(&mut self, class: &str, rects: &[Rect]) {
        let _ = write!(self.out, "<path class=\"{class}\" d=\"");
        for Rect { x, y, width, height } in rects {
            let (x, y, w, h) = (Px(*x), Px(*y), Px(width.max(0.0)), Px(height.max(0.0)));
            let _ = write!(self.out, "M{x} {y}h{w}v{h}h-{w}z");
        }
        self.out.push_str("\"/>");
    }

    pub(super) fn rect(&mut self, class: &str, at: Rect, fill: Option<&str>, tip: &str) {
        let (x, y, w, h) = (Px(at.x), Px(at.y), Px(at.width.max(0.0)), Px(at.height.max(0.0)));
        let _ = write!(self.out, "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{w}\" height=\"{h}\"");
        if let Some(fill) = fill {
            let _ = write!(self.out, " style=\"fill:{fill}\"");
        }
        self.out.push('>');
        self.tip(tip);
        self.out.push_str("</rect>");
    }

    fn tip(&mut self, tip: &str) {
        if !tip.is_empty() {
            let _ = write!(self.out, "<title>{}</title>", escape(tip));
        }
    }
}

/// Rows of a chart's data as the value of an attribute: fields are separated by tabs, rows by line feeds.
#[derive(Default)]
pub(super) struct ChartData {
    rows: String,
}

impl ChartData {
    /// Adds a row: names, then numbers with six significant digits.
    pub(super) fn push(&mut self, names: &[&str], numbers: &[f64]) {
        if !self.rows.is_empty() {
            self.rows.push_str("&#10;");
        }
        self.rows.push_str(&fields(names));
        for (index, number) in numbers.iter().enumerate() {
            if index > 0 || !names.is_empty() {
                self.rows.push_str("&#9;");
            }
            if number.is_finite() {
                self.rows.push_str(&six_digits(*number));
            }
        }
    }
}

/// Escaped fields, separated by tabs; tabs and line feeds within a field become spaces.
fn fields(names: &[&str]) -> String {
    let plain = |name: &&str| escape(&name.replace(['\t', '\n'], " "));
    names.iter().map(plain).collect::<Vec<_>>().join("&#9;")
}

fn six_digits(number: f64) -> String {
    if number == 0.0 {
        return "0".to_string();
    }
    let digits = number.abs().log10().floor() as i32;
    let places = (5 - digits).clamp(0, 300) as usize;
    if !(-7..16).contains(&digits) {
        return format!("{number:.5e}");
    }
    let text = format!("{number:.places$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_string() } else { text }
}

/// A rectangle by its upper left corner and size, in pixels.
#[derive(Clone, Copy)]
pub(super) struct Rect {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) width: f64,
    pub(super) height: f64,
}

/// A coordinate with at most one decimal.
struct Px(f64);

impl std::fmt::Display for Px {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tenths = (self.0.clamp(-1e6, 1e6) * 10.0).round() as i64;
        let sign = if tenths < 0 { "-" } else { "" };
        match tenths.unsigned_abs() {
            whole if whole.is_multiple_of(10) => write!(f, "{sign}{}", whole / 10),
            parts => write!(f, "{sign}{}.{}", parts / 10, parts % 10),
        }
    }
}

/// Distance of the lines of a label.
const LINE: f64 = 13.0;
/// Most lines of a label.
const LINES_MAX: usize = 3;

/// The words of `text` in lines of at most `width` pixels, as far as an estimate can say.
fn wrapped(text: &str, width: f64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        let is_last = lines.len() == LINES_MAX;
        let fits = |line: &String| {
            is_last || text_width(line, 11.5) + text_width(word, 11.5) + 4.0 < width / FONT_SLACK
        };
        match lines.last_mut().filter(|line| fits(line)) {
            Some(line) => {
                line.push(' ');
                line.push_str(word);
            }
            None => lines.push(word.to_string()),
        }
    }
    lines
}

/// Real fonts are up to this much wider than the estimate.
pub(super) const FONT_SLACK: f64 = 1.15;

/// Estimates the width of `text` in pixels for a sans-serif font of `size` pixels, without font metrics.
pub(super) fn text_width(text: &str, size: f64) -> f64 {
    let widths = text.chars().map(|letter| match letter {
        'i' | 'j' | 'l' | 't' | 'f' | 'r' | 'I' | '.' | ',' | ':' | ';' | '|' | '\'' | ' ' | '·' => 0.33,
        'm' | 'w' | 'M' | 'W' | '%' | '@' => 0.88,
        letter if letter.is_uppercase() => 0.68,
        letter if letter.is_ascii() => 0.56,
        _ => 0.8,
    });
    widths.sum::<f64>() * size
}
