//! Private data with which rules reject connection requests.

/// Parses the private data of a rejection, in hexadecimal.
pub(super) fn private_data(text: &str) -> Result<Vec<u8>, String> {
    let byte = |pair: &[u8]| {
        let [high, low] = pair else { return None };
        let digit = |c: u8| char::from(c).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        Some(digit(*high)? << 4 | digit(*low)?)
    };
    let bytes: Option<Vec<u8>> = text.as_bytes().chunks(2).map(byte).collect();
    let valid = bytes.filter(|bytes| (1..=MAX_DATA).contains(&bytes.len()));
    valid.ok_or_else(|| format!("needs 1 to {MAX_DATA} bytes in hexadecimal, as in 00ff"))
}

/// Maximum private data of a rejection in bytes: `private_data_len` of `rdma_get_cm_event(3)` has
/// eight bits.
const MAX_DATA: usize = 255;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::FaultRule;
    use crate::faults::tests::parse_one;

    fn parse(text: &str) -> Result<FaultRule, String> {
        parse_one(&format!("do={text}"))
    }

    #[test]
    fn private_data_are_hexadecimal() {
        assert_eq!(parse("reject data=00fFa1").unwrap().data, [0, 0xFF, 0xA1]);
        assert_eq!(parse("reject").unwrap().data, []);
        let most = "5a".repeat(MAX_DATA);
        assert_eq!(parse(&format!("reject data={most}")).unwrap().data, [0x5A; MAX_DATA]);
        for bad in ["", "0", "0g", "000", &format!("{most}5a"), "0x00"] {
            let error = parse(&format!("reject data={bad}")).unwrap_err();
            assert!(error.ends_with("needs 1 to 255 bytes in hexadecimal, as in 00ff"), "{error}");
        }
        let error = parse("no-reply data=00").unwrap_err();
        assert!(error.starts_with("data has no effect with do=no-reply;"), "{error}");
        let reject = parse("reject verb=rdma_accept data=01").unwrap();
        assert_eq!(reject.select.verb.unwrap().name(), "rdma_accept");
        let error = parse("reject verb=rdma_accept reason=1").unwrap_err();
        assert!(error.starts_with("reason has no effect with do=reject verb=rdma_accept, because"));
    }
}
