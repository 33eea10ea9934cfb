//! Files of keys and values: lines with tabs, JSON lines, or the binary form, read and written record by record.
//!
//! Invariant: offset, count and digest are those of the records that were read or written whole, so that whoever keeps
//! them can go on from there.

use super::binary::{self, Next};
use crate::cli::{jsonl, tsv};
use crc_fast::{CrcAlgorithm, Digest};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;

/// How keys and values lie in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Format {
    /// KEY<tab>VALUE, a line each, with \t \n \r \\ \xHH for what cannot be written
    Tsv,
    /// {"key": "...", "value": "..."}, a line each; key_base64 and value_base64 for bytes that are no UTF-8
    Jsonl,
    /// With a check for each record, and an end, so that damage and a cut-off end are noticed
    Binary,
}

impl Format {
    /// The format that a file's name says, or lines with tabs.
    pub(super) fn of(path: &Path) -> Format {
        let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        match ending.to_ascii_lowercase().as_str() {
            "jsonl" | "ndjson" => Format::Jsonl,
            "bin" => Format::Binary,
            _ => Format::Tsv,
        }
    }
}

/// Where one is in a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Position {
    /// Bytes before it.
    pub(super) offset: u64,
    /// Records before it.
    pub(super) count: u64,
    /// Of the bytes before it.
    pub(super) digest: Digest,
}

impl Position {
    fn start() -> Position {
        Position { offset: 0, count: 0, digest: Digest::new(CrcAlgorithm::Crc64Nvme) }
    }

    fn passed(&mut self, bytes: &[u8]) {
        self.offset += bytes.len() as u64;
        self.digest.update(bytes);
    }
}

/// Reads the bytes before `offset`; where that many are there, the position with so many records.
pub(super) fn position_at(input: &mut impl Read, offset: u64, count: u64) -> io::Result<Option<Position>> {
    let mut at = Position { count, ..Position::start() };
    let mut bytes = vec![0; 1 << 16];
    while at.offset < offset {
        let len = bytes.len().min(usize::try_from(offset - at.offset).unwrap_or(usize::MAX));
        match input.read(&mut bytes[..len]) {
            Ok(0) => return Ok(None),
            Ok(read) => at.passed(&bytes[..read]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Some(at))
}

/// A longer line cannot be a key and a value, even if every byte of them is written as JSON's longest escape.
const LINE_MAX: u64 = 6 * (farside::VALUE_MAX + farside::KEY_MAX) as u64 + 128;

/// A key and its value.
pub(super) type Pair = (Vec<u8>, Vec<u8>);

/// Why there is no further record.
pub(super) enum Wrong {
    /// The input cannot be read.
    Unread(io::Error),
    /// It says something else; what, and what to do.
    Malformed(String),
}

impl From<io::Error> for Wrong {
    fn from(error: io::Error) -> Wrong {
        Wrong::Unread(error)
    }
}

/// Records of a file, one after the other.
pub(super) struct Records<R> {
    input: BufReader<R>,
    format: Format,
    at: Position,
    record: Vec<u8>,
}

impl<R: Read> Records<R> {
    /// The records of an input that was read up to a position, or not at all.
    pub(super) fn new(input: R, format: Format, at: Option<Position>) -> Records<R> {
        let input = BufReader::with_capacity(1 << 20, input);
        Records { input, format, at: at.unwrap_or_else(Position::start), record: Vec::new() }
    }

    /// Where the next record is.
    pub(super) fn position(&self) -> Position {
        self.at
    }

    /// Whether the next record can be had without waiting for more of the input.
    pub(super) fn is_there(&self) -> bool {
        let buffer = self.input.buffer();
        match self.format {
            Format::Tsv | Format::Jsonl => buffer.contains(&b'\n'),
            Format::Binary => {
                let head = buffer.get(..binary::RECORD_HEAD_SIZE).map(binary::decode);
                matches!(head, Some(Ok(Next::Pair { key_len, value_len, .. }))
                    if buffer.len() >= binary::RECORD_HEAD_SIZE + key_len + value_len)
            }
        }
    }

    /// The next record; nothing at the end.
    pub(super) fn next(&mut self) -> Result<Option<Pair>, Wrong> {
        match self.format {
            Format::Tsv => self.line(tsv::parse_line),
            Format::Jsonl => self.line(jsonl::parse_line),
            Format::Binary => self.binary(),
        }
    }

    fn line(&mut self, parse: fn(&[u8]) -> Result<Pair, String>) -> Result<Option<Pair>, Wrong> {
        if self.at.offset == 0 && self.input.fill_buf()?.starts_with(&binary::MAGIC) {
            return Err(Wrong::Malformed("it begins like a binary dump: load it by --format binary".into()));
        }
        self.record.clear();
        let read = self.input.by_ref().take(LINE_MAX).read_until(b'\n', &mut self.record)?;
        if read == 0 {
            return Ok(None);
        }
        let text = self.record.strip_suffix(b"\n").unwrap_or(&self.record);
        let pair = parse(text).map_err(Wrong::Malformed)?;
        self.at.passed(&self.record);
        self.at.count += 1;
        Ok(Some(pair))
    }

    fn binary(&mut self) -> Result<Option<Pair>, Wrong> {
        self.record.clear();
        if self.at.offset == 0 {
            let begins = self.input.fill_buf()?;
            let len = begins.len().min(binary::MAGIC.len());
            if begins[..len] != binary::MAGIC[..len] {
                return Err(Wrong::Malformed(binary::OTHER.into()));
            }
            self.take(binary::HEAD_SIZE)?;
            binary::check_head(&self.record).map_err(Wrong::Malformed)?;
            self.at.passed(&self.record);
            self.record.clear();
        }
        self.take(binary::RECORD_HEAD_SIZE)?;
        match binary::decode(&self.record).map_err(Wrong::Malformed)? {
            Next::Pair { key_len, value_len, check } => {
                self.take(key_len + value_len)?;
                let (key, value) = self.record[binary::RECORD_HEAD_SIZE..].split_at(key_len);
                binary::verify(self.at.count, key, value, check).map_err(Wrong::Malformed)?;
                let pair = (key.to_vec(), value.to_vec());
                self.at.passed(&self.record);
                self.at.count += 1;
                Ok(Some(pair))
            }
            Next::End { check } => {
                self.take(binary::COUNT_SIZE)?;
                let told = &self.record[binary::RECORD_HEAD_SIZE..];
                binary::verify(self.at.count, b"", b"", check).map_err(Wrong::Malformed)?;
                if told != self.at.count.to_le_bytes() {
                    return Err(Wrong::Malformed(
                        "the count at the end does not hold: the file was damaged".into(),
                    ));
                }
                if !self.input.fill_buf()?.is_empty() {
                    return Err(Wrong::Malformed("bytes follow the end: load each dump by itself".into()));
                }
                self.at.passed(&self.record);
                Ok(None)
            }
        }
    }

    /// Reads so many bytes more of a record.
    fn take(&mut self, len: usize) -> Result<(), Wrong> {
        // As the bytes come: what a length claims is no reason to take memory.
        let read = self.input.by_ref().take(len as u64).read_to_end(&mut self.record)?;
        if read < len {
            return Err(Wrong::Malformed(
                "the file ends there, without the end of a dump: it was cut off; use another copy, or, if 'kv \
                 dump' wrote it here and was broken off, go on with that by its --resume"
                    .into(),
            ));
        }
        Ok(())
    }
}

/// A file of records that is being written.
pub(super) struct Writer<W: Write> {
    out: W,
    format: Format,
    at: Position,
    record: Vec<u8>,
}

impl<W: Write> Writer<W> {
    /// A file that has nothing yet, or what was written up to a position.
    pub(super) fn new(out: W, format: Format, at: Option<Position>) -> io::Result<Writer<W>> {
        let is_new = at.is_none();
        let mut writer = Writer { out, format, at: at.unwrap_or_else(Position::start), record: Vec::new() };
        if is_new && format == Format::Binary {
            binary::write_head(&mut writer.record)?;
            writer.put()?;
        }
        Ok(writer)
    }

    /// Where the next record will be.
    pub(super) fn position(&self) -> Position {
        self.at
    }

    /// One record more.
    pub(super) fn write(&mut self, key: &[u8], value: &[u8]) -> io::Result<()> {
        match self.format {
            Format::Tsv => tsv::write_line(&mut self.record, key, value)?,
            Format::Jsonl => jsonl::write_line(&mut self.record, key, value)?,
            Format::Binary => binary::write_record(&mut self.record, self.at.count, key, value)?,
        }
        self.put()?;
        self.at.count += 1;
        Ok(())
    }

    /// All that was written is the system's.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    /// The end.
    pub(super) fn finish(&mut self) -> io::Result<()> {
        if self.format == Format::Binary {
            binary::write_end(&mut self.record, self.at.count)?;
            self.put()?;
        }
        self.out.flush()
    }

    fn put(&mut self) -> io::Result<()> {
        self.out.write_all(&self.record)?;
        self.at.passed(&self.record);
        self.record.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::fuzz::{self, Change, Executions};

    fn written(format: Format, pairs: &[Pair]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut writer = Writer::new(&mut bytes, format, None).expect("memory takes everything");
        for (key, value) in pairs {
            writer.write(key, value).expect("memory takes everything");
        }
        writer.finish().expect("memory takes everything");
        bytes
    }

    /// All records up to the end, or up to what is wrong.
    fn read(format: Format, bytes: &[u8]) -> (Vec<Pair>, Result<(), String>) {
        let mut records = Records::new(bytes, format, None);
        let mut pairs = Vec::new();
        loop {
            match records.next() {
                Ok(Some(pair)) => pairs.push(pair),
                Ok(None) => return (pairs, Ok(())),
                Err(Wrong::Malformed(reason)) => return (pairs, Err(reason)),
                Err(Wrong::Unread(error)) => panic!("memory can be read: {error}"),
            }
        }
    }

    fn some() -> Vec<Pair> {
        let pair = |key: &[u8], value: &[u8]| (key.to_vec(), value.to_vec());
        vec![pair(b"a", b""), pair(b"\xff\t", b"\n\x00"), pair("ключ".as_bytes(), &[7; 70_000])]
    }

    #[test]
    fn what_was_written_is_read_in_every_format() {
        for format in [Format::Tsv, Format::Jsonl, Format::Binary] {
            for pairs in [Vec::new(), some()] {
                assert_eq!(read(format, &written(format, &pairs)), (pairs, Ok(())), "{format:?}");
            }
        }
    }

    #[test]
    fn whoever_goes_on_from_a_position_misses_nothing() {
        for format in [Format::Tsv, Format::Jsonl, Format::Binary] {
            let whole = written(format, &some());
            for before in 0..=some().len() {
                let mut records = Records::new(&whole[..], format, None);
                for _ in 0..before {
                    assert!(matches!(records.next(), Ok(Some(_))));
                }
                let at = records.position();
                if at.offset == 0 {
                    continue;
                }
                let mut rest = &whole[..];
                let found =
                    position_at(&mut rest, at.offset, at.count).expect("memory").expect("it is there");
                assert_eq!(found.digest.finalize(), at.digest.finalize());
                let mut records = Records::new(rest, format, Some(found));
                for pair in &some()[before..] {
                    assert!(matches!(records.next(), Ok(Some(next)) if next == *pair));
                }
                assert!(matches!(records.next(), Ok(None)));

                let mut again = whole[..at.offset as usize].to_vec();
                let mut writer = Writer::new(&mut again, format, Some(at)).expect("memory takes everything");
                for (key, value) in &some()[before..] {
                    writer.write(key, value).expect("memory takes everything");
                }
                writer.finish().expect("memory takes everything");
                assert!(again == whole, "{format:?} from record {before}");
            }
        }
    }

    #[test]
    fn a_binary_file_that_was_cut_or_added_to_is_noticed() {
        let whole = written(Format::Binary, &some());
        for len in 0..whole.len() {
            assert!(read(Format::Binary, &whole[..len]).1.is_err(), "{len} of {}", whole.len());
        }
        assert!(read(Format::Binary, &[&whole[..], b"\0"].concat()).1.is_err());
        assert!(read(Format::Binary, &[&whole[..], &whole[..]].concat()).1.is_err());
        assert!(read(Format::Binary, b"a\tb\n").1.is_err());
        assert!(read(Format::Tsv, &whole).1.expect_err("it is no text").contains("--format binary"));
    }

    /// Whatever becomes of a binary file, its records are the first of those that were written, and it is whole only if
    /// it is as it was.
    #[test]
    fn fuzz_binary_files() {
        let executions = Executions::of("binary files of kv load");
        let inputs = bolero::check!().with_test_time(fuzz::budget()).with_type().cloned();
        inputs.for_each(|(pairs, changes): (Vec<Pair>, Vec<Change>)| {
            executions.one_more();
            let pairs: Vec<Pair> = pairs.into_iter().filter(|(key, _)| !key.is_empty()).collect();
            let whole = written(Format::Binary, &pairs);
            let mut changed = whole.clone();
            fuzz::change(&mut changed, &changes);
            let (read, end) = read(Format::Binary, &changed);
            assert!(pairs.starts_with(&read));
            assert_eq!(end.is_ok(), changed == whole);
        });
    }

    /// Whatever bytes are a file, reading it ends, in every format.
    #[test]
    fn fuzz_files_of_any_bytes() {
        let executions = Executions::of("files of any bytes");
        let inputs = bolero::check!().with_test_time(fuzz::budget()).with_type().cloned();
        inputs.for_each(|(head, bytes): (bool, Vec<u8>)| {
            executions.one_more();
            let mut file = Vec::new();
            if head {
                binary::write_head(&mut file).expect("memory takes everything");
            }
            file.extend_from_slice(&bytes);
            for format in [Format::Tsv, Format::Jsonl, Format::Binary] {
                let (pairs, _) = read(format, &file);
                assert!(pairs.len() <= file.len());
            }
        });
    }
}
