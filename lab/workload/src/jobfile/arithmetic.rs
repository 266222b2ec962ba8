//! Values that are computed: fio's expressions in parentheses.
//!
//! Grammar, precedence and the treatment of fractions are those of fio's `exp/expression-parser.y`: from loose to tight,
//! `+` and `-`, a unit, `*` and `/`, `^`, `%`, the minus sign. A unit applies to the product before it: `(6/2k)` is 3 KiB.
//! Only text that begins with a parenthesis is an expression.

/// Longest expression, as fio's buffer.
const BYTES_MAX: usize = 1000;
/// Deepest nesting of parentheses, signs and powers: the parser calls itself.
const DEPTH_MAX: usize = 64;

/// The units of an expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpressionUnits {
    /// `k` to `p`, also with `b`: powers of 1024.
    Bytes,
    /// `us`, `ms`, `s`, `m`, `h` and `d`, in microseconds.
    Time,
}

/// A number as fio computes with it: both as an integer and as a fraction, with the kind of its leftmost number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ExpressionValue {
    pub(super) integer: i64,
    pub(super) float: f64,
    is_float: bool,
    /// Whether a number in it has a unit.
    pub(super) has_units: bool,
}

/// Evaluates an expression; `None` for text that is none.
///
/// # Errors
/// A message about a syntax error, an unknown unit, a division by 0, or a number of more than 64 bits.
pub(super) fn evaluate(text: &str, units: ExpressionUnits) -> Option<Result<ExpressionValue, String>> {
    let text = text.trim();
    text.starts_with('(').then(|| {
        if text.len() > BYTES_MAX {
            return Err(format!("an expression has at most {BYTES_MAX} characters"));
        }
        let mut parser = ExpressionParser { rest: text, units, has_units: false, depth: 0 };
        let value = parser.expression(Precedence::Sum)?;
        match parser.peek() {
            None => Ok(ExpressionValue { has_units: parser.has_units, ..value }),
            Some(_) => Err(parser.unexpected()),
        }
    })
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Precedence {
    Sum,
    Unit,
    Product,
    Power,
    Remainder,
    Sign,
}

impl Precedence {
    fn of(operator: char) -> Option<Precedence> {
        Some(match operator {
            '+' | '-' => Precedence::Sum,
            '*' | '/' => Precedence::Product,
            '^' => Precedence::Power,
            '%' => Precedence::Remainder,
            _ => return None,
        })
    }

    /// The precedence of the right operand: the next one, except that powers associate to the right.
    fn of_right(self) -> Precedence {
        match self {
            Precedence::Sum => Precedence::Unit,
            Precedence::Unit => Precedence::Product,
            Precedence::Product | Precedence::Power => Precedence::Power,
            Precedence::Remainder | Precedence::Sign => Precedence::Sign,
        }
    }
}

struct ExpressionParser<'a> {
    rest: &'a str,
    units: ExpressionUnits,
    has_units: bool,
    depth: usize,
}

impl<'a> ExpressionParser<'a> {
    fn peek(&mut self) -> Option<char> {
        self.rest = self.rest.trim_start_matches([' ', '\t']);
        self.rest.chars().next()
    }

    fn take(&mut self, wanted: char) -> bool {
        let found = self.peek() == Some(wanted);
        if found {
            self.rest = &self.rest[wanted.len_utf8()..];
        }
        found
    }

    fn take_while(&mut self, belongs: impl Fn(char) -> bool) -> &'a str {
        let end = self.rest.find(|c| !belongs(c)).unwrap_or(self.rest.len());
        let (taken, rest) = self.rest.split_at(end);
        self.rest = rest;
        taken
    }

    fn unexpected(&self) -> String {
        match self.rest.chars().next() {
            Some(found) => format!("{found} is not expected in this expression"),
            None => "the expression is not complete".to_string(),
        }
    }

    /// An expression of operators that bind at least as tightly as `loosest`.
    fn expression(&mut self, loosest: Precedence) -> Result<ExpressionValue, String> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(format!("an expression is nested at most {DEPTH_MAX} deep"));
        }
        let mut value = self.operand()?;
        while let Some(next) = self.peek() {
            if next.is_ascii_alphabetic() && loosest <= Precedence::Unit {
                value = value.in_units(self.unit()?)?;
                continue;
            }
            let Some(precedence) = Precedence::of(next).filter(|one| *one >= loosest) else { break };
            self.take(next);
            let right = self.expression(precedence.of_right())?;
            value = value.combine(next, right)?;
        }
        self.depth -= 1;
        Ok(value)
    }

    fn operand(&mut self) -> Result<ExpressionValue, String> {
        if self.take('-') {
            let value = self.expression(Precedence::Sign)?;
            let integer = value.integer.checked_neg().ok_or_else(too_large)?;
            return Ok(ExpressionValue { integer, float: -value.float, ..value });
        }
        if self.take('(') {
            let value = self.expression(Precedence::Sum)?;
            return if self.take(')') { Ok(value) } else { Err(self.unexpected()) };
        }
        self.number()
    }

    fn number(&mut self) -> Result<ExpressionValue, String> {
        let begin = self.rest;
        if let Some(digits) = self.rest.strip_prefix("0x").or_else(|| self.rest.strip_prefix("0X")) {
            self.rest = digits;
            let digits = self.take_while(|c| c.is_ascii_hexdigit());
            if digits.is_empty() {
                return Err(self.unexpected());
            }
            return i64::from_str_radix(digits, 16).map(ExpressionValue::whole).map_err(|_| too_large());
        }
        let digits = self.take_while(|c| c.is_ascii_digit());
        let is_digit = |text: &str| text.starts_with(|c: char| c.is_ascii_digit());
        let mut is_float = false;
        if let Some(fraction) = self.rest.strip_prefix('.').filter(|rest| is_digit(rest)) {
            self.rest = fraction;
            self.take_while(|c| c.is_ascii_digit());
            is_float = true;
        } else if digits.is_empty() {
            return Err(self.unexpected());
        }
        let exponent = self.rest.strip_prefix(['e', 'E']);
        let unsigned = exponent.map(|text| text.strip_prefix(['+', '-']).unwrap_or(text));
        if let Some(exponent) = unsigned.filter(|text| is_digit(text)) {
            self.rest = exponent;
            self.take_while(|c| c.is_ascii_digit());
            is_float = true;
        }
        let text = &begin[..begin.len() - self.rest.len()];
        if !is_float {
            return text.parse().map(ExpressionValue::whole).map_err(|_| too_large());
        }
        let float: f64 = text.parse().map_err(|_| "it is not a number".to_string())?;
        Ok(ExpressionValue { integer: truncated(float)?, float, is_float: true, has_units: false })
    }

    fn unit(&mut self) -> Result<ExpressionUnit, String> {
        let name = self.take_while(|c| c.is_ascii_alphabetic()).to_ascii_lowercase();
        self.has_units = true;
        let whole = |factor| Ok(ExpressionUnit { factor, is_float: false });
        match (self.units, name.as_str()) {
            (ExpressionUnits::Bytes, "k" | "kb") => whole(1 << 10),
            (ExpressionUnits::Bytes, "m" | "mb") => whole(1 << 20),
            (ExpressionUnits::Bytes, "g" | "gb") => whole(1 << 30),
            (ExpressionUnits::Bytes, "t" | "tb") => whole(1 << 40),
            (ExpressionUnits::Bytes, "p" | "pb") => whole(1 << 50),
            (ExpressionUnits::Bytes, _) => Err(format!("{name} is none of k, m, g, t and p")),
            (ExpressionUnits::Time, "us") => Ok(ExpressionUnit { factor: 1, is_float: true }),
            (ExpressionUnits::Time, "ms") => Ok(ExpressionUnit { factor: 1_000, is_float: true }),
            (ExpressionUnits::Time, "s") => Ok(ExpressionUnit { factor: 1_000_000, is_float: true }),
            (ExpressionUnits::Time, "m") => whole(60_000_000),
            (ExpressionUnits::Time, "h") => whole(3_600_000_000),
            (ExpressionUnits::Time, "d") => whole(86_400_000_000),
            (ExpressionUnits::Time, _) => Err(format!("{name} is none of us, ms, s, m, h and d")),
        }
    }
}

/// A unit, and whether fio computes fractions with it.
struct ExpressionUnit {
    factor: i64,
    is_float: bool,
}

impl ExpressionValue {
    fn whole(integer: i64) -> ExpressionValue {
        ExpressionValue { integer, float: integer as f64, is_float: false, has_units: false }
    }

    /// The value in multiples of a unit. As in fio, the integer of `1.5k` is 1024: that of the fraction is multiplied.
    fn in_units(self, unit: ExpressionUnit) -> Result<ExpressionValue, String> {
        let float = self.float * unit.factor as f64;
        let is_float = self.is_float || unit.is_float;
        let count = if is_float { truncated(self.float)? } else { self.integer };
        let integer = count.checked_mul(unit.factor).ok_or_else(too_large)?;
        Ok(ExpressionValue { integer, float: if is_float { float } else { integer as f64 }, ..self })
    }

    fn combine(self, operator: char, right: ExpressionValue) -> Result<ExpressionValue, String> {
        let is_float = self.is_float || right.is_float;
        let (left, other) = (self.integer, right.integer);
        if matches!(operator, '/' | '%') && (other == 0 && !is_float || right.float.abs() < 1e-20) {
            return Err("it divides by 0".to_string());
        }
        let float = match operator {
            '+' => self.float + right.float,
            '-' => self.float - right.float,
            '*' => self.float * right.float,
            '/' => self.float / right.float,
            '^' => self.float.powf(right.float),
            _ if is_float => return Err("a remainder is of whole numbers".to_string()),
            _ => left.checked_rem(other).ok_or_else(too_large)? as f64,
        };
        let integer = match operator {
            _ if is_float => truncated(float)?,
            '+' => left.checked_add(other).ok_or_else(too_large)?,
            '-' => left.checked_sub(other).ok_or_else(too_large)?,
            '*' => left.checked_mul(other).ok_or_else(too_large)?,
            '/' => left.checked_div(other).ok_or_else(too_large)?,
            '^' if other >= 0 => power(left, other).ok_or_else(too_large)?,
            _ => truncated(float)?,
        };
        // The kind is that of the left operand: fio's parser copies it.
        Ok(ExpressionValue { integer, float, ..self })
    }
}

fn power(base: i64, exponent: i64) -> Option<i64> {
    match base {
        0 | 1 => Some(if exponent == 0 { 1 } else { base }),
        -1 => Some(if exponent % 2 == 0 { 1 } else { -1 }),
        _ => base.checked_pow(u32::try_from(exponent).ok()?),
    }
}

fn truncated(float: f64) -> Result<i64, String> {
    // 2^63 is the first number that is none of i64.
    let fits = float.is_finite() && float.abs() < i64::MAX as f64;
    if fits { Ok(float as i64) } else { Err(too_large()) }
}

fn too_large() -> String {
    "it is too large".to_string()
}

#[cfg(test)]
mod tests;
