//! A litmus program, its text form, and its outcomes.
//!
//! Failures print a program in its text form, and this crate's programs are written in the same form. A printed
//! program is parsed back to the same program:
//!
//! ```text
//! {x[0]=1} A: WRITE y-z=1; fence FAA x[0]-1 | B: CAS x[0] 0->1; READ y-z; wait READ x[6-7]
//! ```
//!
//! `x`, `y`, `z` and `w` are adjacent cache lines of 8 words each. All words are 0 except those in braces. `-` precedes
//! the last line or word of a range. A WRITE of several values lists adjacent places in order: `WRITE x=2,y[0]=0`.
//! `CAS x[0] 2->1 &3/1` compares the bits of the mask 3, and swaps those of the mask 1.
//!
//! Invariant: every program can be run: the words that it names are within its lines, and its size is bounded.

use std::fmt;
use std::str::FromStr;

/// Size of a word in bytes, the unit of atomics and of values.
pub const WORD_SIZE: usize = 8;
/// Number of words of a cache line.
pub const LINE_WORDS: usize = 8;
/// Maximum number of lines of a program's memory: `x`, `y`, `z`, `w`.
pub const LINES_MAX: usize = NAMES.len();

const NAMES: [char; 4] = ['x', 'y', 'z', 'w'];
const ACTORS_MAX: usize = 3;
const STEPS_MAX: usize = 4;
/// Maximum number of lines that one READ or WRITE touches.
const SPAN_MAX: usize = 3;

/// Adjacent words that hold the same value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Piece {
    /// Number of words in the piece.
    pub words: usize,
    /// Value that each word of the piece holds.
    pub value: u64,
}

/// Verb of a program. Each verb names words by their indices in the program's memory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Op {
    /// READ of adjacent words.
    Read {
        /// Index of the first word to read.
        at: usize,
        /// Number of words to read.
        words: usize,
    },
    /// WRITE of adjacent pieces.
    Write {
        /// Index of the first word to write.
        at: usize,
        /// The pieces to write, in the order of their words.
        pieces: Vec<Piece>,
    },
    /// Compare-and-swap of a word.
    Cas {
        /// Index of the word to compare and swap.
        at: usize,
        /// Value that the word must have.
        compare: u64,
        /// Value to store in the word.
        swap: u64,
        /// Bits to compare, then bits to swap.
        masks: [u64; 2],
    },
    /// Fetch-and-add to a word.
    Faa {
        /// Index of the word to add to.
        at: usize,
        /// Number to add, wrapping.
        add: u64,
    },
}

impl Op {
    /// Index of the verb's first word.
    pub fn at(&self) -> usize {
        match self {
            Op::Read { at, .. } | Op::Write { at, .. } | Op::Cas { at, .. } | Op::Faa { at, .. } => *at,
        }
    }

    /// Number of words that the verb touches.
    pub fn words(&self) -> usize {
        match self {
            Op::Read { words, .. } => *words,
            Op::Write { pieces, .. } => pieces.iter().map(|piece| piece.words).sum(),
            Op::Cas { .. } | Op::Faa { .. } => 1,
        }
    }

    /// Returns the words that a WRITE writes; empty for other verbs. Words are little-endian in memory.
    pub fn payload(&self) -> Vec<u64> {
        let Op::Write { pieces, .. } = self else { return Vec::new() };
        pieces.iter().flat_map(|piece| std::iter::repeat_n(piece.value, piece.words)).collect()
    }

    /// Returns the value that an atomic writes back after it has fetched `old`; `None` if it is a CAS whose comparison
    /// fails, or no atomic.
    pub fn written_back(&self, old: u64) -> Option<u64> {
        match *self {
            Op::Cas { compare, swap, masks: [compared, swapped], .. } => {
                ((old ^ compare) & compared == 0).then_some((old & !swapped) | (swap & swapped))
            }
            Op::Faa { add, .. } => Some(old.wrapping_add(add)),
            Op::Read { .. } | Op::Write { .. } => None,
        }
    }

    /// Number of words of the verb's result: all words of a READ, the old word of an atomic, 0 for a WRITE.
    pub fn answer_words(&self) -> usize {
        if matches!(self, Op::Write { .. }) { 0 } else { self.words() }
    }
}

/// When a verb is posted, relative to the previous verb of its connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Start {
    /// The verb is posted together with the previous verb.
    #[default]
    AtOnce,
    /// The verb is posted together with the previous verb, with `IBV_SEND_FENCE`.
    Fenced,
    /// The verb is posted after the previous verb has completed.
    Waits,
}

/// A verb of an actor, and the time when it is posted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Step {
    /// When the verb is posted, relative to the previous verb.
    pub start: Start,
    /// The verb itself.
    pub op: Op,
}

/// Program of one to three actors, each with one connection (QP) to the same node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    pub(super) name: String,
    start: Vec<(usize, Piece)>,
    actors: Vec<Vec<Step>>,
    lines: usize,
}

/// Outcome of a run of a program: the verbs' results and the final memory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Outcome {
    /// Results of all verbs, actor by actor: the words of a READ, the old word of an atomic, nothing for a WRITE.
    pub answers: Vec<Vec<u64>>,
    /// The program's final memory, word by word.
    pub memory: Vec<u64>,
}

/// Error: a text is not a valid program. Contains the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramError(String);

impl fmt::Display for ProgramError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ProgramError {}

impl Program {
    /// Returns the name of the program's shape.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The verbs of each actor, in the order in which they are posted.
    pub fn actors(&self) -> &[Vec<Step>] {
        &self.actors
    }

    /// All verbs with the number of their actor, in the order of [`Outcome::answers`].
    pub fn steps(&self) -> impl Iterator<Item = (usize, &Step)> {
        let of_actor = |(actor, steps)| std::iter::repeat(actor).zip(steps);
        self.actors.iter().enumerate().flat_map(of_actor)
    }

    /// Initial memory, word by word, in whole lines.
    pub fn memory(&self) -> Vec<u64> {
        let mut memory = vec![0; self.lines * LINE_WORDS];
        for &(at, Piece { words, value }) in &self.start {
            memory[at..at + words].fill(value);
        }
        memory
    }

    /// Formats an outcome: first the results in the order of the program's verbs, then the memory.
    pub fn text_of(&self, outcome: &Outcome) -> String {
        let mut actors: Vec<(usize, Vec<String>)> = Vec::new();
        for ((actor, step), answer) in self.steps().zip(&outcome.answers) {
            let text = match step.op {
                Op::Write { .. } => continue,
                Op::Read { at, .. } => format!("READ {}", places(at, answer)),
                Op::Cas { at, .. } => format!("CAS {} was {}", word_name(at), numbers(answer)),
                Op::Faa { at, .. } => format!("FAA {} was {}", word_name(at), numbers(answer)),
            };
            match actors.last_mut() {
                Some((last, texts)) if *last == actor => texts.push(text),
                _ => actors.push((actor, vec![text])),
            }
        }
        let actors =
            actors.into_iter().map(|(actor, texts)| format!("{}: {} | ", letter(actor), texts.join("; ")));
        format!("{}memory {}", actors.collect::<String>(), places(0, &outcome.memory))
    }

    /// Checks the bounds on a program's size that the parser does not check.
    fn checked(self) -> Result<Program, ProgramError> {
        let fail = |what: String| Err(ProgramError(what));
        if !(1..=ACTORS_MAX).contains(&self.actors.len()) {
            return fail(format!("{} actors: write 1 to {ACTORS_MAX}", self.actors.len()));
        }
        for (actor, step) in self.steps() {
            let (op, actor) = (&step.op, letter(actor));
            let (at, words) = (op.at(), op.words());
            let lines = (at + words - 1) / LINE_WORDS - at / LINE_WORDS + 1;
            if lines > SPAN_MAX {
                return fail(format!("a verb of {actor} touches {lines} lines: use at most {SPAN_MAX}"));
            }
        }
        match self.actors.iter().position(|steps| !(1..=STEPS_MAX).contains(&steps.len())) {
            Some(actor) => {
                let count = self.actors[actor].len();
                fail(format!("{} has {count} verbs: write 1 to {STEPS_MAX}", letter(actor)))
            }
            None => Ok(self),
        }
    }
}

fn letter(actor: usize) -> char {
    char::from(b'A' + actor as u8)
}

impl FromStr for Program {
    type Err = ProgramError;

    /// Parses a program.
    ///
    /// # Errors
    /// The text is not a program, or the program is too large to enumerate. The error shows the place.
    fn from_str(text: &str) -> Result<Program, ProgramError> {
        let mut rest = text.trim();
        let mut start = Vec::new();
        if let Some(inner) = rest.strip_prefix('{') {
            let Some((inner, after)) = inner.split_once('}') else {
                return Err(ProgramError("'{' without '}': close the initial memory with '}'".into()));
            };
            for place in inner.split(',') {
                start.push(assignment(place.trim())?);
            }
            rest = after;
        }
        let mut actors = Vec::new();
        for (index, actor) in rest.split('|').enumerate() {
            let name = format!("{}:", letter(index.min(ACTORS_MAX)));
            let Some(steps) = actor.trim().strip_prefix(&name) else {
                return Err(ProgramError(format!("'{}': start the actor with '{name}'", actor.trim())));
            };
            actors.push(steps.split(';').map(|text| step(text.trim())).collect::<Result<Vec<Step>, _>>()?);
        }
        let ends = actors.iter().flatten().map(|step| step.op.at() + step.op.words());
        let ends = ends.chain(start.iter().map(|(at, piece)| at + piece.words));
        let lines = ends.max().unwrap_or(0).div_ceil(LINE_WORDS);
        Program { name: String::new(), start, actors, lines }.checked()
    }
}

fn step(text: &str) -> Result<Step, ProgramError> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let (start, words) = match words.as_slice() {
        ["wait", rest @ ..] => (Start::Waits, rest),
        ["fence", rest @ ..] => (Start::Fenced, rest),
        rest => (Start::AtOnce, rest),
    };
    let unknown = || ProgramError(format!("'{text}': write READ x, WRITE x=1, CAS x[0] 0->1 or FAA x[0]+1"));
    let op = match *words {
        ["READ", place] => {
            let (at, words) = range(place)?;
            Op::Read { at, words }
        }
        ["WRITE", list] => {
            let list = list.split(',').map(assignment).collect::<Result<Vec<_>, _>>()?;
            let at = list[0].0;
            let mut next = at;
            for (place, piece) in &list {
                if *place != next {
                    return Err(ProgramError(format!("'{text}': write adjacent places, in order")));
                }
                next += piece.words;
            }
            Op::Write { at, pieces: list.into_iter().map(|(_, piece)| piece).collect() }
        }
        ["CAS", place, values, ref masks @ ..] => {
            let (compare, swap) = values.split_once("->").ok_or_else(unknown)?;
            let masks = match masks {
                [] => [u64::MAX; 2],
                [masks] => {
                    let masks = masks.strip_prefix('&').and_then(|masks| masks.split_once('/'));
                    let (compared, swapped) = masks.ok_or_else(unknown)?;
                    [number(compared)?, number(swapped)?]
                }
                _ => return Err(unknown()),
            };
            Op::Cas { at: word(place)?, compare: number(compare)?, swap: number(swap)?, masks }
        }
        ["FAA", change] => {
            let sign = change.rfind(['+', '-']).ok_or_else(unknown)?;
            let (place, addend) = change.split_at(sign);
            let magnitude = number(&addend[1..])?;
            let add = if addend.starts_with('-') { magnitude.wrapping_neg() } else { magnitude };
            Op::Faa { at: word(place)?, add }
        }
        _ => return Err(unknown()),
    };
    Ok(Step { start, op })
}

/// Parses `x=1` to the index of the first word and the piece.
fn assignment(text: &str) -> Result<(usize, Piece), ProgramError> {
    let Some((place, value)) = text.split_once('=') else {
        return Err(ProgramError(format!("'{text}': write a place and a value, as in x=1")));
    };
    let (at, words) = range(place)?;
    Ok((at, Piece { words, value: number(value)? }))
}

fn number(text: &str) -> Result<u64, ProgramError> {
    text.parse().map_err(|_| ProgramError(format!("'{text}': write a number below 2^64")))
}

fn word(text: &str) -> Result<usize, ProgramError> {
    match range(text)? {
        (at, 1) => Ok(at),
        _ => Err(ProgramError(format!("'{text}': write one word, as in x[0]"))),
    }
}

/// Parses a range to the index of its first word and its number of words: `x`, `x[3]`, `x[3-5]`, `x-z`, `x[7]-y[0]`.
fn range(text: &str) -> Result<(usize, usize), ProgramError> {
    let bad = || {
        ProgramError(format!(
            "'{text}': write a place, as in x, x[3], x[3-5], x-z or x[7]-y[0], in lines xyzw"
        ))
    };
    // The dash of a range of lines is outside of brackets.
    let dash = text.find(']').map_or(0, |bracket| bracket + 1);
    let dash = text[dash..].find('-').map(|at| at + dash).or_else(|| text.find('-').filter(|&at| at == 1));
    let (first, last) = dash.map_or((text, text), |at| (&text[..at], &text[at + 1..]));
    let (start, _) = words_of(first).ok_or_else(bad)?;
    let (_, end) = words_of(last).ok_or_else(bad)?;
    if end < start { Err(bad()) } else { Ok((start, end - start + 1)) }
}

/// Parses `x`, `x[3]` or `x[3-5]` to the indices of the first and the last word.
fn words_of(text: &str) -> Option<(usize, usize)> {
    let mut letters = text.chars();
    let name = letters.next()?;
    let line = NAMES.iter().position(|&other| other == name)? * LINE_WORDS;
    let rest = letters.as_str();
    if rest.is_empty() {
        return Some((line, line + LINE_WORDS - 1));
    }
    let inner = rest.strip_prefix('[')?.strip_suffix(']')?;
    let (first, last) = inner.split_once('-').unwrap_or((inner, inner));
    let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
    (first <= last && last < LINE_WORDS).then_some((line + first, line + last))
}

fn word_name(at: usize) -> String {
    format!("{}[{}]", NAMES[at / LINE_WORDS], at % LINE_WORDS)
}

/// Formats a range of `words` words in its shortest form.
fn range_name(at: usize, words: usize) -> String {
    let last = at + words - 1;
    let (first_line, last_line) = (at / LINE_WORDS, last / LINE_WORDS);
    if at.is_multiple_of(LINE_WORDS) && words.is_multiple_of(LINE_WORDS) {
        let first = NAMES[first_line];
        return if first_line == last_line { first.into() } else { format!("{first}-{}", NAMES[last_line]) };
    }
    match (words, first_line == last_line) {
        (1, _) => word_name(at),
        (_, true) => format!("{}[{}-{}]", NAMES[first_line], at % LINE_WORDS, last % LINE_WORDS),
        (_, false) => format!("{}-{}", word_name(at), word_name(last)),
    }
}

/// Formats words with their values; equal neighbours of one line are merged: `x=1 y[0]=2 y[1-7]=0`.
fn places(at: usize, words: &[u64]) -> String {
    let mut pieces: Vec<(usize, Piece)> = Vec::new();
    for (place, &value) in words.iter().enumerate().map(|(index, value)| (at + index, value)) {
        match pieces.last_mut() {
            Some((_, piece)) if piece.value == value && !place.is_multiple_of(LINE_WORDS) => piece.words += 1,
            _ => pieces.push((place, Piece { words: 1, value })),
        }
    }
    let texts: Vec<String> = pieces
        .into_iter()
        .map(|(at, Piece { words, value })| format!("{}={}", range_name(at, words), numbers(&[value])))
        .collect();
    texts.join(" ")
}

/// Formats numbers. A number that wrapped below 0 is formatted as a negative number.
fn numbers(words: &[u64]) -> String {
    let text = |&word: &u64| if word > u64::MAX - 16 { (word as i64).to_string() } else { word.to_string() };
    words.iter().map(text).collect::<Vec<_>>().join(" ")
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Read { at, words } => write!(f, "READ {}", range_name(*at, *words)),
            Op::Write { at, pieces } => {
                f.write_str("WRITE ")?;
                let mut next = *at;
                for (index, Piece { words, value }) in pieces.iter().enumerate() {
                    let between = if index == 0 { "" } else { "," };
                    write!(f, "{between}{}={value}", range_name(next, *words))?;
                    next += words;
                }
                Ok(())
            }
            Op::Cas { at, compare, swap, masks } => {
                write!(f, "CAS {} {compare}->{swap}", word_name(*at))?;
                match masks {
                    [u64::MAX, u64::MAX] => Ok(()),
                    [compared, swapped] => write!(f, " &{compared}/{swapped}"),
                }
            }
            Op::Faa { at, add } if *add > u64::MAX / 2 => {
                write!(f, "FAA {}-{}", word_name(*at), add.wrapping_neg())
            }
            Op::Faa { at, add } => write!(f, "FAA {}+{add}", word_name(*at)),
        }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, &(at, Piece { words, value })) in self.start.iter().enumerate() {
            write!(f, "{}{}={value}", if index == 0 { "{" } else { "," }, range_name(at, words))?;
        }
        if !self.start.is_empty() {
            f.write_str("} ")?;
        }
        for (actor, steps) in self.actors.iter().enumerate() {
            write!(f, "{}{}:", if actor == 0 { "" } else { " | " }, letter(actor))?;
            for (index, Step { start, op }) in steps.iter().enumerate() {
                let between = if index == 0 { "" } else { ";" };
                let start = match start {
                    Start::AtOnce => "",
                    Start::Fenced => "fence ",
                    Start::Waits => "wait ",
                };
                write!(f, "{between} {start}{op}")?;
            }
        }
        Ok(())
    }
}
