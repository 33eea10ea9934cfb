//! First bytes of a response, which show whether the node refused the request.
//!
//! ```text
//! chain:  the reply's wire form, whose first byte is a status; or a refusal
//! call:   | 0 u8 | the service's response |; or a refusal
//! refusal: | 0xff u8 | the reason, as UTF-8 |
//! ```

const ANSWERED: u8 = 0;
const REFUSED: u8 = 0xff;
/// Maximum size of a reason, which may quote the request.
const REASON_MAX: usize = 4096;

/// Returns the reason if `answer` is a refusal by the node, else `None`. A refused request was not carried out.
pub fn refusal(answer: &[u8]) -> Option<String> {
    let (&first, reason) = answer.split_first()?;
    (first == REFUSED).then(|| String::from_utf8_lossy(reason).into_owned())
}

/// Returns the service's response, which `answer` contains after its first byte.
pub fn body(answer: &[u8]) -> &[u8] {
    answer.get(1..).unwrap_or_default()
}

/// Writes a refusal. A long reason is truncated.
pub fn refuse(answer: &mut Vec<u8>, reason: &str) {
    let end = (0..=reason.len().min(REASON_MAX)).rev().find(|&end| reason.is_char_boundary(end));
    answer.clear();
    answer.push(REFUSED);
    answer.extend_from_slice(&reason.as_bytes()[..end.unwrap_or(0)]);
}

/// Writes the response of a service.
pub fn put_body(answer: &mut Vec<u8>, body: &[u8]) {
    answer.clear();
    answer.push(ANSWERED);
    answer.extend_from_slice(body);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_differs_from_a_response() {
        let mut answer = Vec::new();
        put_body(&mut answer, b"yes");
        assert_eq!((refusal(&answer), body(&answer)), (None, &b"yes"[..]));
        refuse(&mut answer, "no");
        assert_eq!(refusal(&answer).as_deref(), Some("no"));
        assert_eq!((refusal(&[]), body(&[])), (None, &b""[..]));
        refuse(&mut answer, &"ü".repeat(REASON_MAX));
        assert_eq!(refusal(&answer).map(|reason| reason.len()), Some(REASON_MAX));
    }
}
