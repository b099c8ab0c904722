"""What each request does next; decides in pure Python, never acts."""
