//! Reads and writes files of keys and values, record by record. The formats are lines with tabs, JSON lines, and
//! binary.
//!
//! Invariant: the offset, count and digest of a position cover only records that were read or written completely, so
//! that reading or writing can resume there.

use super::binary::{self, Next};
use crate::cli::{jsonl, tsv};
use crc_fast::{CrcAlgorithm, Digest};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;

/// Format of a file of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(in crate::cli) enum Format {
    /// A line KEY<tab>VALUE for each record, with the escapes \t \n \r \\ \xHH
    Tsv,
    /// A line {"key": "...", "value": "..."} for each record; key_base64 and value_base64 for bytes that are not UTF-8
    Jsonl,
    /// Binary records with checksums and an end mark, which detect damage and truncation
    Binary,
}

impl Format {
    /// Chooses the format by the extension of a file's name. Unknown extensions mean lines with tabs.
    pub(super) fn of(path: &Path) -> Format {
        let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        match ending.to_ascii_lowercase().as_str() {
            "jsonl" | "ndjson" => Format::Jsonl,
            "bin" => Format::Binary,
            _ => Format::Tsv,
        }
    }
}

/// Position between two records of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Position {
    /// Number of bytes before the position.
    pub(super) offset: u64,
    /// Number of records before the position.
    pub(super) count: u64,
    /// CRC of the bytes before the position.
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

/// Reads `input` up to `offset`, and returns the position there, which has `count` records before it. Returns `None` if
/// the input is shorter.
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

/// Maximum number of bytes in a line: a key and a value of maximum length, in which every byte is JSON's longest escape
/// (6 bytes).
const LINE_MAX: u64 = 6 * (farside::VALUE_MAX + farside::KEY_MAX) as u64 + 128;

/// A key and its value.
pub(in crate::cli) type Pair = (Vec<u8>, Vec<u8>);

/// Reason why the next record could not be read.
pub(super) enum RecordError {
    /// The input cannot be read.
    ClosedPipe(io::Error),
    /// The input is malformed. Holds the reason and the remedy.
    Malformed(String),
}

impl From<io::Error> for RecordError {
    fn from(error: io::Error) -> RecordError {
        RecordError::ClosedPipe(error)
    }
}

/// Reads the records of a file in order.
pub(super) struct Records<R> {
    input: BufReader<R>,
    format: Format,
    at: Position,
    record: Vec<u8>,
}

impl<R: Read> Records<R> {
    /// Creates a reader of `input`. The caller has read `input` up to the position `at`, or not at all if `at` is
    /// `None`.
    pub(super) fn new(input: R, format: Format, at: Option<Position>) -> Records<R> {
        let input = BufReader::with_capacity(1 << 20, input);
        Records { input, format, at: at.unwrap_or_else(Position::start), record: Vec::new() }
    }

    /// Returns the position of the next record.
    pub(super) fn position(&self) -> Position {
        self.at
    }

    /// Whether the next record is buffered as a whole, so that [`Records::next`] does not wait for input.
    pub(super) fn is_buffered(&self) -> bool {
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

    /// Reads the next record. Returns `None` at the end of the file.
    pub(super) fn next(&mut self) -> Result<Option<Pair>, RecordError> {
        match self.format {
            Format::Tsv => self.line(tsv::parse_line),
            Format::Jsonl => self.line(jsonl::parse_line),
            Format::Binary => self.binary(),
        }
    }

    fn line(&mut self, parse: fn(&[u8]) -> Result<Pair, String>) -> Result<Option<Pair>, RecordError> {
        if self.at.offset == 0 && self.input.fill_buf()?.starts_with(&binary::MAGIC) {
            return Err(RecordError::Malformed(
                "it begins like a binary dump: load it with --format binary".into(),
            ));
        }
        self.record.clear();
        let read = self.input.by_ref().take(LINE_MAX).read_until(b'\n', &mut self.record)?;
        if read == 0 {
            return Ok(None);
        }
        let text = self.record.strip_suffix(b"\n").unwrap_or(&self.record);
        let pair = parse(text).map_err(RecordError::Malformed)?;
        self.at.passed(&self.record);
        self.at.count += 1;
        Ok(Some(pair))
    }

    fn binary(&mut self) -> Result<Option<Pair>, RecordError> {
        self.record.clear();
        if self.at.offset == 0 {
            let begins = self.input.fill_buf()?;
            let len = begins.len().min(binary::MAGIC.len());
            if begins[..len] != binary::MAGIC[..len] {
                return Err(RecordError::Malformed(binary::NOT_BINARY.into()));
            }
            self.take(binary::HEAD_SIZE)?;
            binary::check_head(&self.record).map_err(RecordError::Malformed)?;
            self.at.passed(&self.record);
            self.record.clear();
        }
        self.take(binary::RECORD_HEAD_SIZE)?;
        match binary::decode(&self.record).map_err(RecordError::Malformed)? {
            Next::Pair { key_len, value_len, check } => {
                self.take(key_len + value_len)?;
                let (key, value) = self.record[binary::RECORD_HEAD_SIZE..].split_at(key_len);
                binary::verify(self.at.count, key, value, check).map_err(RecordError::Malformed)?;
                let pair = (key.to_vec(), value.to_vec());
                self.at.passed(&self.record);
                self.at.count += 1;
                Ok(Some(pair))
            }
            Next::End { check } => {
                self.take(binary::COUNT_SIZE)?;
                let count = &self.record[binary::RECORD_HEAD_SIZE..];
                binary::verify(self.at.count, b"", b"", check).map_err(RecordError::Malformed)?;
                if count != self.at.count.to_le_bytes() {
                    return Err(RecordError::Malformed(
                        "the count at the end does not match: the file is damaged; use another copy of it"
                            .into(),
                    ));
                }
                if !self.input.fill_buf()?.is_empty() {
                    return Err(RecordError::Malformed(
                        "more bytes follow the end: load each dump separately".into(),
                    ));
                }
                self.at.passed(&self.record);
                Ok(None)
            }
        }
    }

    /// Appends `len` bytes of the input to `record`.
    fn take(&mut self, len: usize) -> Result<(), RecordError> {
        // Memory grows with the bytes that were read, not with the stated length, which may be huge in a damaged file.
        let read = self.input.by_ref().take(len as u64).read_to_end(&mut self.record)?;
        if read < len {
            return Err(RecordError::Malformed(
                "the file ends here, without the end mark of a dump: it was cut off; use another copy, or continue \
                 the 'kv dump' that wrote it with --resume"
                    .into(),
            ));
        }
        Ok(())
    }
}

/// Writes the records of a file in order.
pub(super) struct Writer<W: Write> {
    out: W,
    format: Format,
    at: Position,
    record: Vec<u8>,
}

impl<W: Write> Writer<W> {
    /// Creates a writer that continues at the position `at`. `None` means an empty file; the writer then writes the
    /// header, if the format has one.
    pub(super) fn new(out: W, format: Format, at: Option<Position>) -> io::Result<Writer<W>> {
        let is_new = at.is_none();
        let mut writer = Writer { out, format, at: at.unwrap_or_else(Position::start), record: Vec::new() };
        if is_new && format == Format::Binary {
            binary::write_head(&mut writer.record)?;
            writer.put()?;
        }
        Ok(writer)
    }

    /// Returns the position of the next record.
    pub(super) fn position(&self) -> Position {
        self.at
    }

    /// Writes a key and its value as the next record.
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

    /// Passes the buffered bytes to the operating system.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    /// Writes the end mark, if the format has one, and flushes the buffered bytes.
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
        let mut writer = Writer::new(&mut bytes, format, None).expect("a write to memory");
        for (key, value) in pairs {
            writer.write(key, value).expect("a write to memory");
        }
        writer.finish().expect("a write to memory");
        bytes
    }

    /// Returns all records up to the end of the file or the first error, and that error.
    fn read(format: Format, bytes: &[u8]) -> (Vec<Pair>, Result<(), String>) {
        let mut records = Records::new(bytes, format, None);
        let mut pairs = Vec::new();
        loop {
            match records.next() {
                Ok(Some(pair)) => pairs.push(pair),
                Ok(None) => return (pairs, Ok(())),
                Err(RecordError::Malformed(reason)) => return (pairs, Err(reason)),
                Err(RecordError::ClosedPipe(error)) => panic!("a read from memory failed: {error}"),
            }
        }
    }

    fn sample_pairs() -> Vec<Pair> {
        let pair = |key: &[u8], value: &[u8]| (key.to_vec(), value.to_vec());
        vec![pair(b"a", b""), pair(b"\xff\t", b"\n\x00"), pair("ключ".as_bytes(), &[7; 70_000])]
    }

    #[test]
    fn every_format_reads_back_what_it_wrote() {
        for format in [Format::Tsv, Format::Jsonl, Format::Binary] {
            for pairs in [Vec::new(), sample_pairs()] {
                assert_eq!(read(format, &written(format, &pairs)), (pairs, Ok(())), "{format:?}");
            }
        }
    }

    #[test]
    fn resuming_from_any_position_loses_no_record() {
        for format in [Format::Tsv, Format::Jsonl, Format::Binary] {
            let whole = written(format, &sample_pairs());
            for before in 0..=sample_pairs().len() {
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
                    position_at(&mut rest, at.offset, at.count).expect("memory").expect("long enough");
                assert_eq!(found.digest.finalize(), at.digest.finalize());
                let mut records = Records::new(rest, format, Some(found));
                for pair in &sample_pairs()[before..] {
                    assert!(matches!(records.next(), Ok(Some(next)) if next == *pair));
                }
                assert!(matches!(records.next(), Ok(None)));

                let mut again = whole[..at.offset as usize].to_vec();
                let mut writer = Writer::new(&mut again, format, Some(at)).expect("a write to memory");
                for (key, value) in &sample_pairs()[before..] {
                    writer.write(key, value).expect("a write to memory");
                }
                writer.finish().expect("a write to memory");
                assert!(again == whole, "{format:?} from record {before}");
            }
        }
    }

    #[test]
    fn a_truncated_or_extended_binary_file_is_refused() {
        let whole = written(Format::Binary, &sample_pairs());
        for len in 0..whole.len() {
            assert!(read(Format::Binary, &whole[..len]).1.is_err(), "{len} of {}", whole.len());
        }
        assert!(read(Format::Binary, &[&whole[..], b"\0"].concat()).1.is_err());
        assert!(read(Format::Binary, &[&whole[..], &whole[..]].concat()).1.is_err());
        assert!(read(Format::Binary, b"a\tb\n").1.is_err());
        assert!(read(Format::Tsv, &whole).1.expect_err("it is binary").contains("--format binary"));
    }

    /// The records that are read from a changed binary file are a prefix of the written ones. The whole file is read
    /// without an error only if it is unchanged.
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

    /// A reader of arbitrary bytes comes to an end, in every format.
    #[test]
    fn fuzz_files_of_any_bytes() {
        let executions = Executions::of("files of any bytes");
        let inputs = bolero::check!().with_test_time(fuzz::budget()).with_type().cloned();
        inputs.for_each(|(head, bytes): (bool, Vec<u8>)| {
            executions.one_more();
            let mut file = Vec::new();
            if head {
                binary::write_head(&mut file).expect("a write to memory");
            }
            file.extend_from_slice(&bytes);
            for format in [Format::Tsv, Format::Jsonl, Format::Binary] {
                let (pairs, _) = read(format, &file);
                assert!(pairs.len() <= file.len());
            }
        });
    }
}
