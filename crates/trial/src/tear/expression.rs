//! Expressions over fields: the rule by which a reader accepts, the conditions of steps, and the numbers that writers
//! store.
//!
//! ```text
//! all(version == version[0]) and lock == 0
//! crc == crc64(key, value) and before.version == version
//! (version + 1) % 16
//! ```
//!
//! From the weakest to the strongest: `or`; `and`; `not`; `== != < <= > >=`; `&`; `<<`; `+ -`; `* %`. Numbers have 64
//! bits and wrap. `all(…)` and `any(…)` hold if the condition does for all, or any, of the copies of the fields in it.
//! `NAME.field` is the field as the READ `as NAME` has returned it.
//!
//! Invariant: a parsed expression can be evaluated: each name exists, and conditions and numbers are not mixed up.

use super::layout::{Field, RESERVED, number};
use std::ops::Range;

/// Maximum length in bytes of an expression.
const LEN_MAX: usize = 1_000;
/// Maximum depth of an expression.
const DEPTH_MAX: usize = 40;

/// What an expression can name.
#[derive(Clone, Copy, Debug)]
pub struct Names<'a> {
    /// Fields of the object.
    pub fields: &'a [Field],
    /// Names of READs, each with the bytes that the READ returns.
    pub reads: &'a [(String, Range<usize>)],
    /// Names of results of atomics.
    pub results: &'a [String],
}

/// What a client knows when an expression is evaluated.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// The client's copy of the object.
    pub image: Vec<u8>,
    /// What the named READs have returned, at their places in the object.
    pub reads: Vec<Vec<u8>>,
    /// Results of the named atomics.
    pub results: Vec<u64>,
}

/// A number or a condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expression {
    root: Node,
    is_condition: bool,
    text: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    Number(u64),
    Field {
        read: Option<usize>,
        field: usize,
        copy: Copy,
    },
    Result(usize),
    Crc(Vec<(Option<usize>, usize)>),
    Not(Box<Node>),
    Binary(Binary, Box<Node>, Box<Node>),
    /// A condition on all copies of the fields, of which there are this many, or on any.
    Each {
        is_all: bool,
        copies: usize,
        inner: Box<Node>,
    },
}

/// Copy of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Copy {
    At(usize),
    /// The copy of the present round of `all` or `any`.
    Each,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Binary {
    Or,
    And,
    Equal,
    Unequal,
    Less,
    LessOrEqual,
    More,
    MoreOrEqual,
    Bits,
    Shift,
    Plus,
    Minus,
    Times,
    Modulo,
}

/// Operators by strength, the weakest first.
const LEVELS: [&[(&str, Binary)]; 7] = [
    &[("or", Binary::Or)],
    &[("and", Binary::And)],
    &[
        ("==", Binary::Equal),
        ("!=", Binary::Unequal),
        ("<=", Binary::LessOrEqual),
        (">=", Binary::MoreOrEqual),
        ("<", Binary::Less),
        (">", Binary::More),
    ],
    &[("&", Binary::Bits)],
    &[("<<", Binary::Shift)],
    &[("+", Binary::Plus), ("-", Binary::Minus)],
    &[("*", Binary::Times), ("%", Binary::Modulo)],
];
/// Place in [`LEVELS`] of the comparisons. `not` is as strong as `and`, and weaker than a comparison.
const COMPARISONS: usize = 2;

impl Expression {
    /// Parses a condition.
    ///
    /// # Errors
    /// Returns what is wrong, and the remedy.
    pub fn condition(text: &str, names: Names<'_>) -> Result<Expression, String> {
        Expression::parse(text, names, true)
    }

    /// Parses a number.
    ///
    /// # Errors
    /// Returns what is wrong, and the remedy.
    pub fn number(text: &str, names: Names<'_>) -> Result<Expression, String> {
        Expression::parse(text, names, false)
    }

    fn parse(text: &str, names: Names<'_>, is_condition: bool) -> Result<Expression, String> {
        let text = text.trim();
        let about = |reason: String| format!("in '{text}': {reason}");
        if text.len() > LEN_MAX {
            return Err(format!("an expression has {} bytes: write at most {LEN_MAX}", text.len()));
        }
        let tokens = tokens(text).map_err(about)?;
        let mut parser = Parser { tokens: &tokens, names, depth: 0, copies: None, is_within_each: false };
        let (root, is) = parser.level(0).map_err(about)?;
        if let Some(token) = parser.tokens.first() {
            return Err(about(format!(
                "'{token}' is not expected here: write an operator, or end before it"
            )));
        }
        match (is_condition, is) {
            (true, false) => Err(about("this is a number: compare it, as in version == 0".to_owned())),
            (false, true) => Err(about("this is a condition: write a number, as in version + 1".to_owned())),
            _ => Ok(Expression { root, is_condition, text: text.to_owned() }),
        }
    }

    /// The text of the expression.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether the condition holds.
    ///
    /// # Panics
    /// If the expression is a number.
    pub fn holds(&self, fields: &[Field], known: &Known) -> bool {
        assert!(self.is_condition, "a number neither holds nor fails");
        Evaluation { fields, known, each: 0 }.value(&self.root) != 0
    }

    /// Value of the number.
    ///
    /// # Panics
    /// If the expression is a condition.
    pub fn value(&self, fields: &[Field], known: &Known) -> u64 {
        assert!(!self.is_condition, "a condition has no value");
        Evaluation { fields, known, each: 0 }.value(&self.root)
    }

    /// Returns the places in the client's own copy that the expression uses.
    pub fn own_places(&self, fields: &[Field]) -> Vec<Range<usize>> {
        let mut places = Vec::new();
        self.root.visit(&mut |read, field, copy| match (read, copy) {
            (Some(_), _) => {}
            (None, Copy::At(copy)) => places.push(fields[field].copy(copy)),
            (None, Copy::Each) => places.extend(fields[field].ranges()),
        });
        places
    }
}

impl Node {
    fn visit(&self, see: &mut impl FnMut(Option<usize>, usize, Copy)) {
        match self {
            Node::Number(_) | Node::Result(_) => {}
            Node::Field { read, field, copy } => see(*read, *field, *copy),
            Node::Crc(fields) => fields.iter().for_each(|&(read, field)| see(read, field, Copy::Each)),
            Node::Not(inner) | Node::Each { inner, .. } => inner.visit(see),
            Node::Binary(_, left, right) => {
                left.visit(see);
                right.visit(see);
            }
        }
    }
}

struct Evaluation<'a> {
    fields: &'a [Field],
    known: &'a Known,
    each: usize,
}

impl Evaluation<'_> {
    fn image(&self, read: Option<usize>) -> &[u8] {
        read.map_or(&self.known.image, |read| &self.known.reads[read])
    }

    /// Value of a node. A condition is 0 or 1.
    fn value(&self, node: &Node) -> u64 {
        match node {
            Node::Number(number) => *number,
            Node::Result(result) => self.known.results[*result],
            Node::Field { read, field, copy } => {
                let copy = match copy {
                    Copy::At(copy) => *copy,
                    Copy::Each => self.each,
                };
                number(&self.image(*read)[self.fields[*field].copy(copy)])
            }
            Node::Crc(fields) => {
                let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
                for &(read, field) in fields {
                    let image = self.image(read);
                    self.fields[field].ranges().for_each(|range| digest.update(&image[range]));
                }
                digest.finalize()
            }
            Node::Not(inner) => u64::from(self.value(inner) == 0),
            Node::Each { is_all, copies, inner } => {
                let mut each = (0..*copies).map(|each| Evaluation { each, ..*self }.value(inner) != 0);
                u64::from(if *is_all { each.all(|holds| holds) } else { each.any(|holds| holds) })
            }
            Node::Binary(operator, left, right) => {
                let (left, right) = (self.value(left), self.value(right));
                match operator {
                    Binary::Or => left | right,
                    Binary::And | Binary::Bits => left & right,
                    Binary::Equal => u64::from(left == right),
                    Binary::Unequal => u64::from(left != right),
                    Binary::Less => u64::from(left < right),
                    Binary::LessOrEqual => u64::from(left <= right),
                    Binary::More => u64::from(left > right),
                    Binary::MoreOrEqual => u64::from(left >= right),
                    Binary::Shift => {
                        u32::try_from(right).ok().and_then(|by| left.checked_shl(by)).unwrap_or(0)
                    }
                    Binary::Plus => left.wrapping_add(right),
                    Binary::Minus => left.wrapping_sub(right),
                    Binary::Times => left.wrapping_mul(right),
                    Binary::Modulo => left.checked_rem(right).unwrap_or(0),
                }
            }
        }
    }
}

/// Splits a text into names, numbers and signs.
fn tokens(text: &str) -> Result<Vec<&str>, String> {
    const SIGNS: [&str; 18] =
        ["==", "!=", "<=", ">=", "<<", "<", ">", "&", "+", "-", "*", "%", "(", ")", "[", "]", ",", "."];
    let mut tokens = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let len = if first.is_ascii_alphanumeric() || first == '_' {
            rest.find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_').unwrap_or(rest.len())
        } else {
            let sign = SIGNS.iter().find(|sign| rest.starts_with(**sign));
            sign.ok_or_else(|| {
                format!("'{first}' has no meaning here: write and, or, not, a comparison, or & << + - * %")
            })?
            .len()
        };
        let (token, after) = rest.split_at(len);
        tokens.push(token);
        rest = after.trim_start();
    }
    Ok(tokens)
}

struct Parser<'a> {
    tokens: &'a [&'a str],
    names: Names<'a>,
    depth: usize,
    /// Number of copies of the fields within the present `all` or `any`, once known.
    copies: Option<usize>,
    is_within_each: bool,
}

/// A node, and whether it is a condition.
type Typed = (Node, bool);

impl Parser<'_> {
    fn peek(&self) -> Option<&str> {
        self.tokens.first().copied()
    }

    fn next(&mut self) -> Option<String> {
        let (first, rest) = self.tokens.split_first()?;
        self.tokens = rest;
        Some((*first).to_owned())
    }

    fn takes(&mut self, token: &str) -> bool {
        let is_there = self.peek() == Some(token);
        if is_there {
            self.next();
        }
        is_there
    }

    fn expects(&mut self, token: &str, after: &str) -> Result<(), String> {
        if self.takes(token) {
            return Ok(());
        }
        let found = self.peek().map_or("the end".to_owned(), |found| format!("'{found}'"));
        Err(format!("{found} follows {after}: write '{token}' there"))
    }

    fn deeper<R>(&mut self, parse: impl FnOnce(&mut Self) -> Result<R, String>) -> Result<R, String> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(format!("it is nested deeper than {DEPTH_MAX}: split it into several checks"));
        }
        let parsed = parse(self);
        self.depth -= 1;
        parsed
    }

    /// Parses the operators of a level and all stronger ones.
    fn level(&mut self, level: usize) -> Result<Typed, String> {
        let Some(operators) = LEVELS.get(level) else { return self.operand() };
        if level == COMPARISONS && self.takes("not") {
            let (inner, is_condition) = self.deeper(|parser| parser.level(level))?;
            return match is_condition {
                true => Ok((Node::Not(Box::new(inner)), true)),
                false => Err("a number follows 'not': write a condition there".to_owned()),
            };
        }
        let (mut left, mut is_condition) = self.level(level + 1)?;
        while let Some(&(sign, operator)) =
            operators.iter().find(|(sign, _)| self.tokens.first() == Some(sign))
        {
            self.next();
            let (right, is_right_condition) = self.level(level + 1)?;
            let takes_conditions = level < COMPARISONS;
            if is_condition != takes_conditions || is_right_condition != takes_conditions {
                let what = if takes_conditions { "conditions" } else { "numbers" };
                return Err(format!("'{sign}' takes two {what}: put what it takes in brackets"));
            }
            if operator == Binary::Modulo && !matches!(right, Node::Number(1..)) {
                return Err("the right of '%' is not a number above 0: write one, as in % 16".to_owned());
            }
            (left, is_condition) =
                (Node::Binary(operator, Box::new(left), Box::new(right)), level <= COMPARISONS);
        }
        Ok((left, is_condition))
    }

    fn operand(&mut self) -> Result<Typed, String> {
        let Some(token) = self.next() else {
            return Err("it ends where a field or a number is expected: complete it".to_owned());
        };
        match token.as_str() {
            "(" => {
                let inner = self.deeper(|parser| parser.level(0))?;
                self.expects(")", "what '(' opens")?;
                Ok(inner)
            }
            "-" => {
                let (inner, is_condition) = self.deeper(Self::operand)?;
                match is_condition {
                    true => Err("a condition follows '-': write a number there".to_owned()),
                    false => {
                        Ok((Node::Binary(Binary::Minus, Box::new(Node::Number(0)), Box::new(inner)), false))
                    }
                }
            }
            "true" => Ok((Node::Not(Box::new(Node::Number(0))), true)),
            "false" => Ok((Node::Not(Box::new(Node::Number(1))), true)),
            "all" | "any" => self.each(token == "all"),
            "crc64" => self.crc(),
            _ if token.starts_with(|letter: char| letter.is_ascii_digit()) => {
                Ok((Node::Number(literal(&token)?), false))
            }
            _ if token.starts_with(|letter: char| letter.is_ascii_alphabetic() || letter == '_') => {
                self.named(&token)
            }
            _ => Err(format!("'{token}' stands where a field or a number is expected: write one there")),
        }
    }

    /// Parses what follows `all` or `any`.
    fn each(&mut self, is_all: bool) -> Result<Typed, String> {
        let name = if is_all { "all" } else { "any" };
        if std::mem::replace(&mut self.is_within_each, true) {
            return Err(format!("'{name}' stands within all or any: write one of them"));
        }
        self.expects("(", name)?;
        let (inner, is_condition) = self.deeper(|parser| parser.level(0))?;
        self.expects(")", &format!("what {name}( opens"))?;
        self.is_within_each = false;
        let copies = self.copies.take();
        match (is_condition, copies) {
            (false, _) => Err(format!("{name}(…) has a number: write a condition in it")),
            (true, None) => Err(format!(
                "{name}(…) names no field with copies: name one without an index, or drop {name}"
            )),
            (true, Some(copies)) => Ok((Node::Each { is_all, copies, inner: Box::new(inner) }, true)),
        }
    }

    /// Parses what follows `crc64`.
    fn crc(&mut self) -> Result<Typed, String> {
        self.expects("(", "crc64")?;
        let mut fields = Vec::new();
        loop {
            let name = self.next().unwrap_or_default();
            let (read, field) = self.field(&name)?;
            self.returns(read, &self.names.fields[field].span(), &name)?;
            fields.push((read, field));
            if !self.takes(",") {
                break;
            }
        }
        self.expects(")", "the fields of crc64")?;
        Ok((Node::Crc(fields), false))
    }

    /// Parses `name` or, if it is the name of a READ, `name.field`. Returns the READ and the field.
    fn field(&mut self, name: &str) -> Result<(Option<usize>, usize), String> {
        let Names { fields, reads, .. } = self.names;
        let find = |name: &str| fields.iter().position(|field| field.name == name);
        let Some(read) = reads.iter().position(|(read, _)| read == name) else {
            return find(name).map(|field| (None, field)).ok_or_else(|| self.unknown(name));
        };
        self.expects(".", &format!("'{name}', the name of a READ"))?;
        let name = self.next().unwrap_or_default();
        let field = find(&name).ok_or_else(|| self.unknown(&name))?;
        Ok((Some(read), field))
    }

    /// Checks that a READ returns these bytes of a field.
    fn returns(&self, read: Option<usize>, place: &Range<usize>, name: &str) -> Result<(), String> {
        let Some((read, bytes)) = read.map(|read| &self.names.reads[read]) else { return Ok(()) };
        match place.start >= bytes.start && place.end <= bytes.end {
            true => Ok(()),
            false => Err(format!("the READ as {read} does not return all of '{name}': READ it too")),
        }
    }

    fn named(&mut self, name: &str) -> Result<Typed, String> {
        if let Some(result) = self.names.results.iter().position(|result| result == name) {
            return Ok((Node::Result(result), false));
        }
        let (read, field) = self.field(name)?;
        let Field { name, len, copies, .. } = &self.names.fields[field];
        if !self.names.fields[field].is_number() {
            return Err(format!(
                "field '{name}' is no number ({}): use it in crc64(…) only",
                if *len > 8 { format!("it has {len} bytes") } else { "it is data".to_owned() }
            ));
        }
        let copy = if self.takes("[") {
            let index = self.next().unwrap_or_default();
            let index = literal(&index)?;
            self.expects("]", &format!("{name}[{index}"))?;
            let copy = usize::try_from(index).ok().filter(|index| index < copies);
            Copy::At(copy.ok_or_else(|| {
                format!("{name}[{index}] does not exist: '{name}' has {copies} copies, from 0 on")
            })?)
        } else if *copies == 1 {
            Copy::At(0)
        } else if !self.is_within_each {
            return Err(format!(
                "'{name}' has {copies} copies: name one, as {name}[0], or write all(…) or any(…)"
            ));
        } else if self.copies.is_some_and(|others| others != *copies) {
            return Err(format!(
                "'{name}' has {copies} copies, another field here has not: use one all for each"
            ));
        } else {
            self.copies = Some(*copies);
            Copy::Each
        };
        let found = &self.names.fields[field];
        let place = match copy {
            Copy::At(copy) => found.copy(copy),
            Copy::Each => found.span(),
        };
        self.returns(read, &place, &found.name)?;
        Ok((Node::Field { read, field, copy }, false))
    }

    fn unknown(&self, name: &str) -> String {
        let Names { fields, reads, results } = self.names;
        if RESERVED.contains(&name) || name.is_empty() {
            return format!("'{name}' stands where a field is expected: name a field there");
        }
        let names = fields.iter().map(|field| &field.name).chain(reads.iter().map(|(name, _)| name));
        let names: Vec<&str> = names.chain(results).map(String::as_str).collect();
        format!("nothing has the name '{name}': name one of {}", names.join(", "))
    }
}

/// Parses a number: decimal, or hexadecimal after `0x`. `_` may separate digits.
fn literal(text: &str) -> Result<u64, String> {
    let digits = text.replace('_', "");
    let parsed = match digits.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => digits.parse(),
    };
    parsed.map_err(|_| format!("'{text}' is no number: write one below 2^64, as 12 or 0x1f"))
}
