//! A protocol as a TOML file.
//!
//! ```toml
//! name = "header and footer versions, one READ"
//! size = 192
//!
//! [fields]
//! front = { at = 0, len = 8 }
//! body = { at = 8, len = 176, data = true }
//! rear = { at = 184, len = 8 }
//!
//! [writers]
//! put = ["READ all", "update", "set front = front + 1", "set rear = front", "WRITE all"]
//!
//! [reader]
//! steps = ["READ all"]
//! accept = "front == rear"
//! ```
//!
//! Invariant: a description that was parsed can run: what its steps name exists, and no input makes a run panic.

use super::layout::{self, Field};
use super::program::{Program, Writing};
use super::{Attempt, Far, Protocol, Shape, Unusable};
use serde::Deserialize;
use std::collections::BTreeMap;
use toml::Spanned;

/// Maximum number of clients of one kind.
const CLIENTS_MAX: usize = 4;

/// A protocol that a TOML file describes.
#[derive(Clone, Debug)]
pub struct Description {
    /// Name of the protocol.
    pub name: String,
    /// Whether the file claims that the protocol is correct even if the lines of a WRITE land in any order.
    pub holds_relaxed: bool,
    /// Whether the lines of a WRITE to this object always land in any order.
    pub relaxed: bool,
    fields: Vec<Field>,
    shape: Shape,
    kinds: Vec<String>,
    writers: Vec<Program>,
    reader: Program,
}

/// The file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: String,
    size: Spanned<usize>,
    #[serde(default = "two")]
    writers_max: Spanned<usize>,
    #[serde(default = "two")]
    readers_max: Spanned<usize>,
    #[serde(default)]
    holds_relaxed: bool,
    #[serde(default)]
    relaxed: bool,
    #[serde(default)]
    start: Vec<Spanned<String>>,
    fields: BTreeMap<String, Spanned<FieldOfFile>>,
    writers: Spanned<BTreeMap<String, Spanned<Vec<Spanned<String>>>>>,
    reader: Reader,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct FieldOfFile {
    at: usize,
    len: usize,
    every: Option<usize>,
    #[serde(default = "one")]
    copies: usize,
    #[serde(default)]
    data: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Reader {
    steps: Spanned<Vec<Spanned<String>>>,
    accept: Spanned<String>,
}

fn one() -> usize {
    1
}

fn two() -> Spanned<usize> {
    Spanned::new(0..0, 2)
}

/// Text of a file, to find the line of an offset.
struct Lines<'a>(&'a str);

impl Lines<'_> {
    fn of<T>(&self, place: &Spanned<T>) -> usize {
        self.at(place.span().start)
    }

    fn at(&self, offset: usize) -> usize {
        self.0.bytes().take(offset).filter(|&byte| byte == b'\n').count() + 1
    }

    fn wrong<T>(&self, place: &Spanned<T>) -> impl Fn(String) -> Unusable {
        let line = self.of(place);
        move |reason| Unusable { line: Some(line), reason }
    }
}

impl Description {
    /// Parses the text of a TOML file.
    ///
    /// # Errors
    /// The text is no description: the error has the line and the remedy.
    pub fn parse(text: &str) -> Result<Description, Unusable> {
        let lines = Lines(text);
        let file: File = toml::from_str(text).map_err(|error| Unusable {
            line: error.span().map(|span| lines.at(span.start)),
            reason: format!(
                "{}: compare the file with those in examples/tear and the guide's page on tear",
                error.message().replace('\n', ", ")
            ),
        })?;
        let size = *file.size.get_ref();
        if !(1..=layout::SIZE_MAX).contains(&size) {
            let reason = format!("an object has {size} bytes: give it a size from 1 to {}", layout::SIZE_MAX);
            return Err(lines.wrong(&file.size)(reason));
        }
        let clients = |count: &Spanned<usize>, what: &str| match *count.get_ref() {
            found @ 1..=CLIENTS_MAX => Ok(found),
            found => Err(lines.wrong(count)(format!("{found} {what} cannot run: give 1 to {CLIENTS_MAX}"))),
        };
        let (writers_max, readers_max) =
            (clients(&file.writers_max, "writers")?, clients(&file.readers_max, "readers")?);
        let fields = fields(&file.fields, size, &lines)?;

        let mut start = Writing::of_start(&fields, size);
        start.step_all(&file.start, &lines)?;
        let mut image = vec![0; size];
        let line = file.start.first().map(|step| lines.of(step));
        let prepare = Program::of_sets(start).map_err(|reason| Unusable { line, reason })?;
        prepare.prepare(&fields, &mut image);

        let (mut kinds, mut writers, mut has_update) = (Vec::new(), Vec::new(), false);
        for (kind, steps) in file.writers.get_ref() {
            let mut writing = Writing::new(&fields, size);
            writing.step_all(steps.get_ref(), &lines)?;
            has_update |= writing.has_update();
            writers.push(writing.end(None).map_err(lines.wrong(steps))?);
            kinds.push(kind.clone());
        }
        if !has_update {
            let reason = "no writer has the step update, so the data never changes: add it to one";
            return Err(lines.wrong(&file.writers)(reason.to_owned()));
        }
        let Reader { steps, accept } = &file.reader;
        let mut reading = Writing::new(&fields, size);
        reading.step_all(steps.get_ref(), &lines)?;
        if !reading.has_read_data() {
            let reason = "the reader READs no data: READ a field with data = true";
            return Err(lines.wrong(steps)(reason.to_owned()));
        }
        let reader = reading.end(Some(accept.get_ref())).map_err(lines.wrong(accept))?;
        let data = fields.iter().filter(|field| field.is_data).flat_map(Field::ranges).collect();
        let shape = Shape { start: image, data, writers_max, readers_max };
        let (name, holds_relaxed, relaxed) = (file.name, file.holds_relaxed, file.relaxed);
        Ok(Description { name, holds_relaxed, relaxed, fields, shape, kinds, writers, reader })
    }

    /// Condition under which the reader accepts, as the file has it.
    pub fn accept(&self) -> &str {
        self.reader.accept().map_or("true", |accept| accept.text())
    }
}

fn fields(
    found: &BTreeMap<String, Spanned<FieldOfFile>>,
    size: usize,
    lines: &Lines<'_>,
) -> Result<Vec<Field>, Unusable> {
    let field = |(name, field): (&String, &Spanned<FieldOfFile>)| {
        let FieldOfFile { at, len, every, copies, data } = field.get_ref().clone();
        Field { name: name.clone(), at, len, copies, every: every.unwrap_or(len), is_data: data }
    };
    let mut fields: Vec<Field> = found.iter().map(field).collect();
    fields.sort_by_key(|field| field.at);
    layout::check(&fields, size).map_err(|(name, reason)| lines.wrong(&found[&name])(reason))?;
    if !fields.iter().any(|field| field.is_data) {
        let reason = "no field is data: write data = true at the value that writers write".to_owned();
        return Err(Unusable { line: found.values().next().map(|field| lines.of(field)), reason });
    }
    Ok(fields)
}

impl Writing<'_> {
    fn step_all(&mut self, steps: &[Spanned<String>], lines: &Lines<'_>) -> Result<(), Unusable> {
        steps.iter().try_for_each(|step| self.step(step.get_ref()).map_err(lines.wrong(step)))
    }
}

impl Protocol for Description {
    fn shape(&self) -> &Shape {
        &self.shape
    }

    fn kinds(&self) -> &[String] {
        &self.kinds
    }

    async fn write<F: Far>(&self, far: &F, kind: usize) -> Attempt {
        self.writers[kind].attempt(&self.fields, self.shape.start.len(), far).await
    }

    async fn read<F: Far>(&self, far: &F) -> Attempt {
        self.reader.attempt(&self.fields, self.shape.start.len(), far).await
    }

    fn describe(&self, at: usize, bytes: &[u8]) -> String {
        let mut words: Vec<String> = Vec::new();
        for field in &self.fields {
            for (copy, range) in field.ranges().enumerate() {
                let (from, to) = (range.start.max(at), range.end.min(at + bytes.len()));
                if from >= to {
                    continue;
                }
                let seen = &bytes[from - at..to - at];
                let word = if field.is_data {
                    format!("{} of {}", field.name, super::truth::numbers_text(seen))
                } else if !field.is_number() {
                    continue;
                } else if to - from < field.len {
                    format!("a part of {}", field.name_of(copy))
                } else {
                    match layout::number(seen) {
                        number if number > u64::MAX >> 8 => format!("{}={number:#x}", field.name_of(copy)),
                        number => format!("{}={number}", field.name_of(copy)),
                    }
                };
                if !words.contains(&word) {
                    words.push(word);
                }
            }
        }
        words.join(", ")
    }
}
