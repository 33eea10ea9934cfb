//! Steps of an operation, and their interpreter.
//!
//! ```text
//! CAS lock 0 -> 1; READ all      posted together; the next step waits for both
//! check version % 2 == 0         if it fails, the operation starts again
//! update                         gives the data a new value, in the client's own copy
//! set version = version + 1      in the client's own copy
//! post WRITE all; FAA lock - 1   posted together; the next step does not wait
//! ```
//!
//! A CAS without `as NAME` must succeed, or the operation starts again. `fence` before a verb holds it back until the
//! client's earlier READs and atomics have completed.
//!
//! Invariant: a parsed program uses no byte of the client's own copy that it has neither READ nor set.

use super::expression::{Expression, Known, Names};
use super::layout::{self, Field};
use super::{Attempt, Far, Posting};
use farside_sim::nic::Verb;
use std::ops::Range;
use std::rc::Rc;

/// Maximum number of steps of an operation, and of verbs of a step.
const STEPS_MAX: usize = 64;

/// Steps of an operation.
#[derive(Clone, Debug)]
pub struct Program {
    steps: Vec<Step>,
    /// Condition under which the operation is done; otherwise it starts again. `None` if it always is.
    accept: Option<Expression>,
    /// Number of named READs, and of named results.
    named: [usize; 2],
}

#[derive(Clone, Debug)]
enum Step {
    Post {
        verbs: Vec<Act>,
        is_awaited: bool,
    },
    /// Stores a number in one copy of a field, or in all.
    Set {
        field: usize,
        copy: Option<usize>,
        value: Expression,
    },
    /// Posts the verbs, and starts the operation again, unless the condition holds.
    Check {
        condition: Expression,
        otherwise: Vec<Act>,
    },
    Update,
}

/// A verb of a step.
#[derive(Clone, Debug)]
struct Act {
    is_fenced: bool,
    what: What,
    text: Rc<str>,
}

#[derive(Clone, Debug)]
enum What {
    Read { bytes: Range<usize>, read: Option<usize> },
    Write { bytes: Range<usize> },
    Cas { at: usize, compare: Expression, swap: Expression, result: Option<usize> },
    FetchAdd { at: usize, add: Expression, is_minus: bool, result: Option<usize> },
}

/// Parser of a program: what is known at the step that comes next.
pub struct Writing<'a> {
    fields: &'a [Field],
    size: usize,
    reads: Vec<(String, Range<usize>)>,
    results: Vec<String>,
    /// Bytes of the client's own copy that it has READ or set.
    known: Vec<bool>,
    /// Bytes that the client has READ.
    seen: Vec<bool>,
    steps: Vec<Step>,
}

impl<'a> Writing<'a> {
    /// Begins a program on an object of `size` bytes with these fields.
    pub fn new(fields: &'a [Field], size: usize) -> Writing<'a> {
        let nothing = vec![false; size];
        Writing {
            fields,
            size,
            reads: Vec::new(),
            results: Vec::new(),
            known: nothing.clone(),
            seen: nothing,
            steps: Vec::new(),
        }
    }

    /// Begins the program that describes an object before all operations, which is 0 so far.
    pub fn of_start(fields: &'a [Field], size: usize) -> Writing<'a> {
        Writing { known: vec![true; size], ..Writing::new(fields, size) }
    }

    /// Whether the program has given the data a new value so far.
    pub fn has_update(&self) -> bool {
        self.steps.iter().any(|step| matches!(step, Step::Update))
    }

    /// Whether the program has READ data so far.
    pub fn has_read_data(&self) -> bool {
        self.fields
            .iter()
            .filter(|field| field.is_data)
            .flat_map(Field::ranges)
            .flatten()
            .any(|at| self.seen[at])
    }

    /// Ends the program.
    ///
    /// # Errors
    /// Returns what is wrong, and the remedy.
    pub fn end(self, accept: Option<&str>) -> Result<Program, String> {
        let accept = accept.map(|text| self.condition(text)).transpose()?;
        if !self.steps.iter().any(|step| matches!(step, Step::Post { is_awaited: true, .. })) {
            return Err("no step waits for a verb: write at least one verb without post".to_owned());
        }
        Ok(Program { steps: self.steps, accept, named: [self.reads.len(), self.results.len()] })
    }

    /// Adds a step.
    ///
    /// # Errors
    /// Returns what is wrong, and the remedy.
    pub fn step(&mut self, text: &str) -> Result<(), String> {
        if self.steps.len() == STEPS_MAX {
            return Err(format!("an operation has more than {STEPS_MAX} steps: split it"));
        }
        let text = text.trim();
        let (word, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let step = match word {
            "update" if rest.trim().is_empty() => {
                let data = self.fields.iter().filter(|field| field.is_data).flat_map(Field::ranges).flatten();
                data.for_each(|at| self.known[at] = true);
                Step::Update
            }
            "update" => {
                return Err(format!(
                    "'{}' follows update: update takes nothing, it renews all data",
                    rest.trim()
                ));
            }
            "set" => self.set(rest)?,
            "check" => {
                let (condition, otherwise) = match rest.split_once(" else ") {
                    Some((condition, otherwise)) => (condition, self.verbs(otherwise, true)?),
                    None => (rest, Vec::new()),
                };
                Step::Check { condition: self.condition(condition)?, otherwise }
            }
            "post" => Step::Post { verbs: self.verbs(rest, false)?, is_awaited: false },
            _ => Step::Post { verbs: self.verbs(text, true)?, is_awaited: true },
        };
        self.steps.push(step);
        Ok(())
    }

    /// Parses `FIELD = NUMBER`.
    fn set(&mut self, text: &str) -> Result<Step, String> {
        let (place, value) = text
            .split_once('=')
            .ok_or_else(|| format!("'set {text}' has no '=': write it like set version = version + 1"))?;
        let value = self.number(value)?;
        let (field, copy) = self.place(place)?;
        let found = &self.fields[field];
        if !found.is_number() {
            return Err(match found.is_data {
                true => format!("'{}' is data, which no step may choose: write update", found.name),
                false => {
                    format!("'{}' has {} bytes: only fields of up to 8 bytes are set", found.name, found.len)
                }
            });
        }
        let copies = copy.map_or(0..found.copies, |copy| copy..copy + 1);
        copies.flat_map(|copy| found.copy(copy)).for_each(|at| self.known[at] = true);
        Ok(Step::Set { field, copy, value })
    }

    /// Parses verbs that are separated by `;`.
    fn verbs(&mut self, text: &str, is_awaited: bool) -> Result<Vec<Act>, String> {
        let texts: Vec<&str> = text.split(';').map(str::trim).collect();
        if texts.len() > STEPS_MAX {
            return Err(format!("a step has {} verbs: write at most {STEPS_MAX}", texts.len()));
        }
        texts.into_iter().map(|text| self.verb(text, is_awaited)).collect()
    }

    fn verb(&mut self, whole: &str, is_awaited: bool) -> Result<Act, String> {
        let unfenced = whole.strip_prefix("fence ").map(str::trim);
        let (text, name) = match unfenced.unwrap_or(whole).rsplit_once(" as ") {
            Some((text, name)) => (text.trim(), Some(name.trim())),
            None => (unfenced.unwrap_or(whole), None),
        };
        let (word, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let rest = rest.trim();
        if let Some(name) = name.filter(|_| !is_awaited) {
            return Err(format!("nothing waits for '{name}': drop post, or the name"));
        }
        let what = match word {
            "READ" if !is_awaited => {
                return Err(format!("nothing waits for '{whole}', so it reads nothing: drop post"));
            }
            "READ" => {
                let bytes = self.bytes(rest)?;
                bytes.clone().for_each(|at| self.seen[at] = true);
                let read = match name {
                    None => {
                        bytes.clone().for_each(|at| self.known[at] = true);
                        None
                    }
                    Some(name) => {
                        self.new_name(name)?;
                        self.reads.push((name.to_owned(), bytes.clone()));
                        Some(self.reads.len() - 1)
                    }
                };
                What::Read { bytes, read }
            }
            "WRITE" => {
                if let Some(name) = name {
                    return Err(format!(
                        "a WRITE returns nothing that '{name}' could name: drop 'as {name}'"
                    ));
                }
                let bytes = self.bytes(rest)?;
                self.requires(&bytes, "WRITEs")?;
                What::Write { bytes }
            }
            "CAS" => {
                let form = || format!("'{whole}' is no CAS: write it like CAS lock 0 -> 1");
                let (before, swap) = rest.split_once("->").ok_or_else(form)?;
                let (place, compare) = before.trim().split_once(char::is_whitespace).ok_or_else(form)?;
                let at = self.word(place)?;
                let (compare, swap) = (self.number(compare)?, self.number(swap)?);
                What::Cas { at, compare, swap, result: self.result(name)? }
            }
            "FAA" => {
                let form = || format!("'{whole}' is no FAA: write it like FAA lock + 1");
                let sign = rest.find(['+', '-']).ok_or_else(form)?;
                let at = self.word(&rest[..sign])?;
                let add = self.number(&rest[sign + 1..])?;
                What::FetchAdd {
                    at,
                    add,
                    is_minus: rest[sign..].starts_with('-'),
                    result: self.result(name)?,
                }
            }
            _ => {
                return Err(format!(
                    "'{word}' is no verb and no step: write READ, WRITE, CAS, FAA, post, set, update or check"
                ));
            }
        };
        Ok(Act { is_fenced: unfenced.is_some(), what, text: whole.into() })
    }

    fn result(&mut self, name: Option<&str>) -> Result<Option<usize>, String> {
        let Some(name) = name else { return Ok(None) };
        self.new_name(name)?;
        self.results.push(name.to_owned());
        Ok(Some(self.results.len() - 1))
    }

    fn new_name(&self, name: &str) -> Result<(), String> {
        let is_name = name.starts_with(|letter: char| letter.is_ascii_alphabetic())
            && name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_')
            && !layout::RESERVED.contains(&name);
        if !is_name {
            return Err(format!(
                "'{name}' is no name: use letters, digits and _, and no word of this language"
            ));
        }
        let is_taken = self.fields.iter().any(|field| field.name == name)
            || self.reads.iter().any(|(other, _)| other == name)
            || self.results.iter().any(|other| other == name);
        if is_taken { Err(format!("the name '{name}' is taken: choose another after as")) } else { Ok(()) }
    }

    /// Parses a word that an atomic can change, and returns its offset.
    fn word(&self, text: &str) -> Result<usize, String> {
        let (field, copy) = self.place(text)?;
        let found = &self.fields[field];
        if copy.is_none() && found.copies > 1 {
            return Err(format!(
                "'{}' has {} copies: name one, as {}[0]",
                found.name, found.copies, found.name
            ));
        }
        let range = found.copy(copy.unwrap_or(0));
        if range.len() != 8 || !range.start.is_multiple_of(8) {
            return Err(format!(
                "an atomic changes 8 bytes at a multiple of 8, but '{}' has {} bytes at {}: change its at or len",
                found.name,
                range.len(),
                range.start
            ));
        }
        Ok(range.start)
    }

    /// Parses `all`, `FIELD` or `FIELD..FIELD`.
    fn bytes(&self, text: &str) -> Result<Range<usize>, String> {
        if text == "all" {
            return Ok(0..self.size);
        }
        let (first, last) = text.split_once("..").unwrap_or((text, text));
        let range = |text: &str| {
            self.place(text).map(|(field, copy)| {
                let field = &self.fields[field];
                copy.map_or_else(|| field.span(), |copy| field.copy(copy))
            })
        };
        let (first, last) = (range(first)?, range(last)?);
        match last.end > first.start {
            true => Ok(first.start..last.end),
            false => Err(format!("'{text}' ends before it begins: name the field at the lower offset first")),
        }
    }

    /// Parses `FIELD` or `FIELD[INDEX]`.
    fn place(&self, text: &str) -> Result<(usize, Option<usize>), String> {
        let text = text.trim();
        let (name, index) = match text.split_once('[') {
            Some((name, index)) => (name.trim(), Some(index)),
            None => (text, None),
        };
        let Some(found) = self.fields.iter().position(|field| field.name == name) else {
            let names: Vec<&str> = self.fields.iter().map(|field| field.name.as_str()).collect();
            return Err(format!("there is no field '{name}': name all, or one of {}", names.join(", ")));
        };
        let copies = self.fields[found].copies;
        let index = index.map(|index| {
            let parsed = index.strip_suffix(']').and_then(|index| index.trim().parse().ok());
            parsed.filter(|&index| index < copies).ok_or_else(|| {
                format!("'{text}' does not exist: write an index below {copies}, as in {name}[0]")
            })
        });
        Ok((found, index.transpose()?))
    }

    fn names(&self) -> Names<'_> {
        Names { fields: self.fields, reads: &self.reads, results: &self.results }
    }

    fn condition(&self, text: &str) -> Result<Expression, String> {
        let parsed = Expression::condition(text, self.names())?;
        self.uses_known(parsed)
    }

    fn number(&self, text: &str) -> Result<Expression, String> {
        let parsed = Expression::number(text, self.names())?;
        self.uses_known(parsed)
    }

    fn uses_known(&self, parsed: Expression) -> Result<Expression, String> {
        let who = format!("'{}' uses", parsed.text());
        parsed.own_places(self.fields).iter().try_for_each(|place| self.requires(place, &who))?;
        Ok(parsed)
    }

    /// Checks that the client knows what its own copy has in all fields that these bytes touch.
    fn requires(&self, bytes: &Range<usize>, who: &str) -> Result<(), String> {
        let unknown = bytes.clone().filter(|&at| !self.known[at]);
        for at in unknown {
            let field = self.fields.iter().find(|field| field.ranges().any(|range| range.contains(&at)));
            if let Some(Field { name, is_data, .. }) = field {
                let remedy =
                    if *is_data { "READ it, or write update before" } else { "READ or set it before" };
                return Err(format!("{who} field '{name}', whose value this client does not know: {remedy}"));
            }
        }
        Ok(())
    }
}

impl Program {
    /// Sets the fields of an image that belongs to nobody yet.
    pub fn prepare(&self, fields: &[Field], image: &mut Vec<u8>) {
        let mut known = Known { image: std::mem::take(image), ..Known::default() };
        self.steps.iter().for_each(|step| set(step, fields, &mut known));
        *image = known.image;
    }

    /// Ends a program that only sets fields.
    ///
    /// # Errors
    /// A step does something else.
    pub fn of_sets(writing: Writing<'_>) -> Result<Program, String> {
        match writing.steps.iter().all(|step| matches!(step, Step::Set { .. })) {
            true => Ok(Program { steps: writing.steps, accept: None, named: [0, 0] }),
            false => Err("start takes set alone: it describes the object before all operations".to_owned()),
        }
    }

    /// Condition under which the operation is done, if it has one.
    pub fn accept(&self) -> Option<&Expression> {
        self.accept.as_ref()
    }

    /// Attempts the operation once, on an object of `size` bytes.
    pub async fn attempt<F: Far>(&self, fields: &[Field], size: usize, far: &F) -> Attempt {
        let [reads, results] = self.named;
        let mut known =
            Known { image: vec![0; size], reads: vec![vec![0; size]; reads], results: vec![0; results] };
        for step in &self.steps {
            match step {
                Step::Set { .. } => set(step, fields, &mut known),
                Step::Update => far.update(&mut known.image),
                Step::Check { condition, otherwise } => {
                    if !condition.holds(fields, &known) {
                        if !otherwise.is_empty() {
                            far.post(postings(otherwise, fields, &known)).await;
                        }
                        return Attempt::Again;
                    }
                }
                Step::Post { verbs, is_awaited: false } => drop(far.post(postings(verbs, fields, &known))),
                Step::Post { verbs, is_awaited: true } => {
                    let posted = postings(verbs, fields, &known);
                    let compared: Vec<Option<u64>> = posted.iter().map(compared).collect();
                    let mut has_failed = false;
                    let results = far.post(posted).await;
                    for ((verb, result), compared) in verbs.iter().zip(results).zip(compared) {
                        match &verb.what {
                            What::Read { bytes, read: None } => {
                                known.image[bytes.clone()].copy_from_slice(&result);
                            }
                            What::Read { bytes, read: Some(read) } => {
                                known.reads[*read][bytes.clone()].copy_from_slice(&result);
                            }
                            What::Cas { result: None, .. } => {
                                has_failed |= compared != Some(layout::number(&result));
                            }
                            What::Cas { result: Some(named), .. }
                            | What::FetchAdd { result: Some(named), .. } => {
                                known.results[*named] = layout::number(&result);
                            }
                            What::FetchAdd { result: None, .. } | What::Write { .. } => {}
                        }
                    }
                    if has_failed {
                        return Attempt::Again;
                    }
                }
            }
        }
        match &self.accept {
            Some(accept) if !accept.holds(fields, &known) => Attempt::Again,
            _ => Attempt::Done,
        }
    }
}

fn set(step: &Step, fields: &[Field], known: &mut Known) {
    let Step::Set { field, copy, value } = step else { return };
    let (field, number) = (&fields[*field], value.value(fields, known));
    for copy in copy.map_or(0..field.copies, |copy| copy..copy + 1) {
        layout::store(&mut known.image[field.copy(copy)], number);
    }
}

/// Returns the value with which a CAS compares.
fn compared(posting: &Posting) -> Option<u64> {
    match posting.verb {
        Verb::Cas { compare, .. } => Some(compare),
        _ => None,
    }
}

fn postings(verbs: &[Act], fields: &[Field], known: &Known) -> Vec<Posting> {
    let posting = |act: &Act| {
        let verb = match &act.what {
            What::Read { bytes, .. } => Verb::Read { at: bytes.start as u64, len: bytes.len() },
            What::Write { bytes } => {
                Verb::Write { at: bytes.start as u64, bytes: known.image[bytes.clone()].to_vec() }
            }
            What::Cas { at, compare, swap, .. } => {
                Verb::cas(*at as u64, compare.value(fields, known), swap.value(fields, known))
            }
            What::FetchAdd { at, add, is_minus, .. } => {
                let add = add.value(fields, known);
                Verb::FetchAdd { at: *at as u64, add: if *is_minus { add.wrapping_neg() } else { add } }
            }
        };
        Posting { verb, is_fenced: act.is_fenced, text: Rc::clone(&act.text) }
    };
    verbs.iter().map(posting).collect()
}
